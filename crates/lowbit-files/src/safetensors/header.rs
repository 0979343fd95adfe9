use std::collections::HashSet;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// The JSON header, in its own order. Names that occur twice are an error: a JSON map would keep one of the two.
pub(super) struct Header {
    pub metadata: Vec<(String, String)>,
    pub entries: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
pub(super) struct Entry {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data_offsets: [usize; 2],
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header { metadata: Vec::new(), entries: Vec::new() };
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("{name} occurs twice")));
            }
            let context = |error| A::Error::custom(format_args!("{name}: {error}"));
            if name == super::METADATA {
                header.metadata = map.next_value::<UniqueMap>().map_err(context)?.0;
            } else {
                let entry = map.next_value().map_err(context)?;
                header.entries.push((name, entry));
            }
        }
        Ok(header)
    }
}

/// A JSON map from strings to strings, in its own order, without duplicates.
pub(crate) struct UniqueMap(pub Vec<(String, String)>);

impl<'de> Deserialize<'de> for UniqueMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueMapVisitor)
    }
}

struct UniqueMapVisitor;

impl<'de> Visitor<'de> for UniqueMapVisitor {
    type Value = UniqueMap;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a map from strings to strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueMap, A::Error> {
        let mut entries = Vec::new();
        let mut seen = HashSet::new();
        while let Some((name, value)) = map.next_entry::<String, String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("{name} occurs twice")));
            }
            entries.push((name, value));
        }
        Ok(UniqueMap(entries))
    }
}
