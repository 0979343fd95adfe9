//! Tests of the driver's parts that no op shows.

use super::*;
use crate::gpu::copy::Columns;
use std::path::Path;

/// A device of its own; none where tests run on another.
fn device(cache: Option<&Path>) -> Option<Gpu> {
    if std::env::var("LOWBIT_GPU").is_ok_and(|name| name != NAME) {
        return None;
    }
    let options = cache.into_iter().fold(VulkanOptions::default(), VulkanOptions::with_cache);
    Some(Gpu::vulkan(&options).expect("a Vulkan driver, such as Mesa's lavapipe"))
}

/// `len` bytes of which each differs from its neighbours.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256 * 13 + i / 65536) as u8).collect()
}

fn read(gpu: &Gpu, memory: &Memory, start: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xaa; len];
    gpu.download(memory, start, &mut bytes).unwrap();
    bytes
}

fn copy(gpu: &Gpu, from: &Memory, to: &Memory, len: usize) -> Result<(), KernelError> {
    gpu.copy_columns(Columns::row(from.into(), len), Columns::row(to.into(), len), 1)
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_ne_bytes(bytes.try_into().expect("4 bytes"))
}

#[test]
fn bytes_go_there_and_back() {
    let Some(gpu) = device(None) else { return };
    // Short, with a rest, and more than all staging memory.
    for len in [0, 4, 4093, 4096, 5000, (70 << 20) + 3] {
        let data = bytes(len);
        let memory = gpu.upload(&data).unwrap();
        assert!(read(&gpu, &memory, 0, len) == data, "{len} bytes");
    }
    let memory = gpu.upload(&bytes(1000)).unwrap();
    gpu.write(&memory, 4, &[1; 8]).unwrap();
    gpu.write(&memory, 15, &[2; 3]).unwrap();
    let want = [&bytes(4)[..], &[1; 8], &bytes(15)[12..], &[2; 3], &bytes(20)[18..]].concat();
    assert_eq!(read(&gpu, &memory, 0, 20), want);
    assert_eq!(read(&gpu, &memory, 9, 7), want[9..16]);
    // Of lengths that do not fit into the slots of those before, and of one that does.
    for count in [1, 2, 100, 3] {
        let want: Vec<u32> = read(&gpu, &memory, 4, 4 * count).chunks(4).map(word).collect();
        let words = gpu.read_later(&memory, 4, count).unwrap();
        gpu.write(&memory, 4, &[count as u8; 4]).unwrap();
        assert_eq!(words.wait().unwrap(), want, "as they were then");
    }
}

#[test]
fn memory_is_used_again_and_has_limits() {
    let Some(gpu) = device(None) else { return };
    let address = |memory: &Memory| Vulkan::block(memory).address;
    let [first, second] = [1000, 1000].map(|len| gpu.allocate(len).unwrap());
    assert_ne!(address(&first), address(&second));
    assert!(address(&second).is_multiple_of(memory::ALIGNMENT));
    let freed = address(&first);
    drop(first);
    assert_eq!(address(&gpu.allocate(1024).unwrap()), freed);
    let message = gpu.allocate(1 << 60).unwrap_err().to_string();
    let start = "vulkan: 1152921504606846976 bytes were asked for at once, and an allocation holds at most ";
    assert!(message.starts_with(start), "{message}");
    let context = Arc::new(Context::open(None).unwrap());
    let message = Pool::new(context).shortage(3 << 20).to_string();
    assert!(message.starts_with("vulkan: 3 MiB of memory were asked for, and "), "{message}");
    assert!(message.ends_with(": out of memory"), "{message}");
}

#[test]
fn a_device_has_its_number_or_the_devices_are_named() {
    let Some(best) = device(None) else { return };
    // Device 0 may lack a feature that is needed: only opening it tells.
    let first = Gpu::vulkan(&VulkanOptions::default().with_device(0));
    if let Ok(first) = &first {
        assert_eq!(first.product(), best.product());
    }
    let message = Gpu::vulkan(&VulkanOptions::default().with_device(1000)).unwrap_err().to_string();
    assert!(message.starts_with("vulkan:1000: no device has this number; there is vulkan:0 "), "{message}");
    assert!(message.contains(&best.product()), "{message}");
}

/// A pass reads and writes the same memory at each replay, in the order of its launches, whatever
/// was freed meanwhile.
#[test]
fn a_pass_is_replayed_while_other_threads_launch() {
    const LEN: usize = 1 << 16;
    let Some(gpu) = device(None) else { return };
    let (x, y) = (gpu.upload(&bytes(LEN)).unwrap(), gpu.filled(LEN, 0).unwrap());
    let work = || {
        // A chain of copies through memory that only the pass keeps.
        let between = gpu.allocate(LEN)?;
        gpu.fill(&between, LEN, 5)?;
        copy(&gpu, &x, &between, LEN)?;
        let other = gpu.allocate(LEN)?;
        copy(&gpu, &between, &other, LEN)?;
        copy(&gpu, &other, &y, LEN)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (0..3)
            .map(|thread| {
                let gpu = &gpu;
                scope.spawn(move || {
                    for round in 0..20u8 {
                        let memory = gpu.filled(LEN, thread * 20 + round).unwrap();
                        let copied = gpu.allocate(LEN).unwrap();
                        copy(gpu, &memory, &copied, LEN).unwrap();
                        assert!(read(gpu, &copied, 0, LEN) == vec![thread * 20 + round; LEN]);
                    }
                })
            })
            .collect();
        let pass = gpu.capture(work).unwrap();
        for round in 0..10u8 {
            gpu.fill(&y, LEN, 0).unwrap();
            gpu.write(&x, 0, &[round; 4]).unwrap();
            pass.replay().unwrap();
            let got = read(&gpu, &y, 0, LEN);
            assert!(got[..4] == [round; 4] && got[4..] == bytes(LEN)[4..], "replay {round}");
        }
        others.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let refused = gpu.capture(|| {
        // The warm-up may.
        gpu.write(&x, 0, &[0; 4])
    });
    assert_eq!(refused.unwrap_err().to_string(), "vulkan: memory was written while a pass is captured");
    let time = gpu.time(work).unwrap();
    assert!(time > Duration::ZERO && time < Duration::from_secs(60), "{time:?}");
}

/// Kernels come back from the disk, and are compiled again where a file is broken.
#[test]
fn kernels_are_kept_on_the_disk() {
    let folder = std::env::temp_dir().join(format!("lowbit-vulkan-cache-{}", std::process::id()));
    let compilations = || {
        let gpu = device(Some(&folder))?;
        let memory = gpu.filled(64, 3).unwrap();
        assert_eq!(read(&gpu, &memory, 0, 64), [3; 64]);
        Some(gpu.compilations())
    };
    if compilations().is_none() {
        return;
    }
    assert_eq!(compilations(), Some(0));
    let files = || {
        let folders = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let files = folders.flat_map(|folder| std::fs::read_dir(folder).unwrap());
        files.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
    };
    assert_eq!(files().len(), 2, "{:?}", files());
    for file in files() {
        let whole = std::fs::read(&file).unwrap();
        let half = &whole[..whole.len() / 2];
        std::fs::write(&file, half).unwrap();
        let is_module = file.extension().is_some_and(|it| it == "spv");
        assert_eq!(compilations(), Some(is_module.into()), "{}", file.display());
        assert!(std::fs::read(&file).unwrap() != half, "{} was not written again", file.display());
    }
    std::fs::remove_dir_all(folder).unwrap();
}
