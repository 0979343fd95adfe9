use lowbit_files::Tokenizer;

use crate::file;

/// Texts that patterns, normalizers and merges may stumble over.
const TEXTS: [&str; 4] = [
    "ab <s>c  A\u{c9}e\u{301} 12\n\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "   \u{a0}\u{1f468}\u{200d}\u{1f469} \u{fdfa}\u{65e5}\u{672c}\u{feff}",
    "",
];

/// A tokenizer.json: what loads encodes and decodes, or says why not.
pub fn tokenizer_json(data: &[u8]) {
    let Ok(tokenizer) = Tokenizer::from_json(&file(), data) else { return };
    for text in TEXTS {
        // Patterns may be made so that a text takes as long as is allowed.
        let Ok(ids) = tokenizer.encode(text, true) else { return };
        assert!(ids.iter().all(|&id| tokenizer.token(id).is_some()), "{ids:?}");
        if tokenizer.decode(&ids).is_err() {
            return;
        }
        let Ok(mut stream) = tokenizer.stream(&ids[..ids.len() / 2]) else { return };
        for &id in &ids[ids.len() / 2..] {
            if stream.push(id).is_err() {
                return;
            }
        }
        _ = stream.flush();
    }
    let any: Vec<u32> = (0..40).chain([1 << 24, u32::MAX]).collect();
    _ = tokenizer.decode(&any);
}
