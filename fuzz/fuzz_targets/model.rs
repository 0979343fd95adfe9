#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lowbit_fuzz::model(data));
