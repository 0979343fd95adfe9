use super::*;
use std::io::{Read, Write};
use std::time::Instant;

/// A subscriber's side of ZMTP 3.1, byte by byte, as libzmq sends it.
fn subscribe(address: SocketAddr, prefix: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    subscribe_on(&mut stream, prefix);
    stream
}

fn subscribe_on(stream: &mut TcpStream, prefix: &[u8]) {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL".to_vec();
    greeting.resize(64, 0);
    stream.write_all(&greeting).unwrap();
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).unwrap();
    assert_eq!(&theirs[..16], b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL");
    stream.write_all(b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0").unwrap();
    let mut ready = [0; 27];
    stream.read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    let wanted = [&[0, prefix.len() as u8 + 1, 1], prefix].concat();
    stream.write_all(&wanted).unwrap();
}

/// Tells events until a subscriber hears of them: its subscription may be on its way.
fn heard(publisher: &CacheEvents, stream: &mut TcpStream, events: &[CacheEvent]) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let (mut bytes, start) = (vec![0; 1000], Instant::now());
    while start.elapsed() < Duration::from_secs(10) {
        publisher.tell(events.to_vec());
        if let Ok(count) = stream.read(&mut bytes) {
            bytes.truncate(count);
            return bytes;
        }
    }
    panic!("nothing was heard");
}

#[test]
fn events_have_vllms_form() {
    let stored = |parent, blocks: Vec<u64>| {
        let tokens = (0..2 * blocks.len() as u32).map(|id| 127 + id).collect();
        CacheEvent::Stored { parent, blocks, tokens }
    };
    let bytes = batch(&[stored(None, vec![1 << 40, 7]), stored(Some(300), vec![9]), CacheEvent::Cleared]);
    let expected = [
        b"\x93".to_vec(),
        bytes[1..10].to_vec(),
        b"\x93\x97\xabBlockStored\x92\xcf\0\0\x01\0\0\0\0\0\x07\xc0".to_vec(),
        b"\x94\x7f\xcc\x80\xcc\x81\xcc\x82\x02\xc0\xa3GPU".to_vec(),
        b"\x97\xabBlockStored\x91\x09\xcd\x01\x2c\x92\x7f\xcc\x80\x02\xc0\xa3GPU".to_vec(),
        b"\x91\xb0AllBlocksCleared\0".to_vec(),
    ];
    assert_eq!(bytes, expected.concat());
    assert_eq!(bytes[1], 0xcb, "the time");
    let bytes = batch(&[CacheEvent::Removed { blocks: (0..16).collect() }]);
    let expected = b"\x91\x93\xacBlockRemoved\xdc\0\x10\0\x01";
    assert_eq!(bytes[10..10 + expected.len()], expected[..]);
    assert!(bytes.ends_with(b"\x0e\x0f\xa3GPU\0"));
}

#[test]
fn subscribers_hear_the_topics_that_they_want() {
    let publisher = KvPublisher::start("@tcp://127.0.0.1:0", "kv@me").unwrap();
    let (address, events) = (publisher.address().unwrap(), publisher.events());
    let (mut all, mut other) = (subscribe(address, b""), subscribe(address, b"kv@you"));
    let bytes = heard(&events, &mut all, &[CacheEvent::Cleared]);
    assert!(bytes.starts_with(b"\x01\x05kv@me\x01\x08\0\0\0\0\0\0\0"), "{bytes:?}");
    assert!(bytes.ends_with(b"\x91\xb0AllBlocksCleared\0"), "{bytes:?}");
    // A frame of more than 255 bytes.
    let blocks = (1 << 60..(1 << 60) + 40).collect();
    let bytes = heard(&events, &mut all, &[CacheEvent::Removed { blocks }]);
    assert_eq!(bytes[bytes.len() - 5..], *b"\xa3GPU\0");
    other.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    assert!(other.read(&mut [0]).is_err(), "it wants another topic");
    drop(publisher);
    other.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(other.read(&mut [0]).unwrap(), 0, "the end closes connections");
}

#[test]
fn a_subscriber_that_waits_is_found_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    let publisher = KvPublisher::start(&endpoint, "").unwrap();
    assert_eq!(publisher.address(), None);
    for _ in 0..2 {
        let mut stream = listener.accept().unwrap().0;
        subscribe_on(&mut stream, b"");
        heard(&publisher.events(), &mut stream, &[CacheEvent::Cleared]);
    }
}

#[test]
fn strangers_are_sent_away() {
    let publisher = KvPublisher::start("@tcp://127.0.0.1:0", "").unwrap();
    let address = publisher.address().unwrap();
    for (greeting, more) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], &b""[..]),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x01NULL", b""),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01CURVE", b""),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB"),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", b"\x04\x0a\x05READY\xff\0\0\0"),
        (b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL", b"\x06\xff\xff\xff\xff\xff\xff\xff\xff"),
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
        let mut greeting = greeting.to_vec();
        greeting.resize(64, 0);
        stream.write_all(&greeting).unwrap();
        stream.write_all(more).unwrap();
        let mut all = vec![];
        // A connection that is closed before all was read may be reset.
        let _ = stream.read_to_end(&mut all);
        assert!(all.len() <= 64 + 27, "{}", all.len());
    }
    let mut stream = subscribe(address, b"");
    stream.write_all(b"\0\x01\x07").unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap_or(0), 0, "no subscription");
}

#[test]
fn endpoints_are_read() {
    let bound = |address: &str| Some(Endpoint::Bound(address.into()));
    assert_eq!(endpoint("tcp://*:5557"), bound("0.0.0.0:5557"));
    assert_eq!(endpoint("@tcp://[::1]:1"), bound("[::1]:1"));
    assert_eq!(endpoint("tcp://indexer:5557"), Some(Endpoint::Connected("indexer:5557")));
    for wrong in ["", "ipc:///tmp/x", "tcp://:1", "tcp://a", "tcp://a:b", "tcp://a:70000", "*:1"] {
        assert_eq!(endpoint(wrong), None, "{wrong}");
    }
    let error = KvPublisher::start("udp://a:1", "").unwrap_err();
    assert_eq!(error.to_string(), "udp://a:1: tcp://HOST:PORT, tcp://*:PORT or @tcp://HOST:PORT is wanted");
}
