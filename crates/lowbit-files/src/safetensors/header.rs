use std::collections::HashSet;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::shown;

/// The most dimensions of a tensor, and entries of `__metadata__`: many more than published, and
/// few enough that a header takes no more memory than a small multiple of its size.
const DIMENSIONS: usize = 16;
const METADATA_ENTRIES: usize = 1 << 16;

/// The JSON header, in its own order. Names that occur twice are an error: a JSON map would keep
/// one of the two.
pub(super) struct Header {
    pub metadata: Vec<(String, String)>,
    pub entries: Vec<(String, Entry)>,
}

#[derive(Deserialize)]
pub(super) struct Entry {
    pub dtype: String,
    #[serde(deserialize_with = "shape")]
    pub shape: Vec<usize>,
    pub data_offsets: [usize; 2],
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<usize>, D::Error> {
    deserializer.deserialize_seq(ShapeVisitor)
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Vec<usize>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of sizes")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sizes: A) -> Result<Vec<usize>, A::Error> {
        let mut shape = Vec::new();
        while let Some(size) = sizes.next_element()? {
            if shape.len() == DIMENSIONS {
                return Err(A::Error::custom(format_args!("at most {DIMENSIONS} dimensions are supported")));
            }
            shape.push(size);
        }
        Ok(shape)
    }
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
                return Err(A::Error::custom(format_args!("{} occurs twice", shown(&name))));
            }
            let context = |error| A::Error::custom(format_args!("{}: {error}", shown(&name)));
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
pub(super) struct UniqueMap(pub Vec<(String, String)>);

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
                return Err(A::Error::custom(format_args!("{} occurs twice", shown(&name))));
            }
            if entries.len() == METADATA_ENTRIES {
                return Err(A::Error::custom(format_args!(
                    "at most {METADATA_ENTRIES} entries are supported"
                )));
            }
            entries.push((name, value));
        }
        Ok(UniqueMap(entries))
    }
}
