//! Reading and writing of GGUF files: valid, damaged and malicious ones.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use proptest::prelude::*;
use tinkex_weights::{BlockFormat, DType, Error, GgufArray, GgufFile, GgufValue, GgufWriter};

/// Returns the bytes of a file with these tensors, all of whose bytes are `fill`.
fn file_bytes(writer: &GgufWriter, sizes: &[usize], fill: u8) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    writer.write(&path, |i, out| Ok(out.write_all(&vec![fill; sizes[i]])?)).unwrap();
    let bytes = std::fs::read(path).unwrap();
    assert_eq!(bytes.len() as u64, writer.file_bytes());
    bytes
}

/// Returns a file with metadata of every type and tensors of several types.
fn example() -> Vec<u8> {
    let mut writer = GgufWriter::new();
    writer
        .metadata("general.architecture", "llama")
        .metadata("a.u8", GgufValue::U8(200))
        .metadata("a.i16", GgufValue::I16(-5))
        .metadata("a.u32", 7_u32)
        .metadata("a.f32", 0.5_f32)
        .metadata("a.bool", true)
        .metadata("a.u64", u64::MAX)
        .metadata("a.f64", GgufValue::F64(-1.5))
        .metadata("a.tokens", vec!["<s>".to_owned(), "ä".to_owned(), String::new()])
        .metadata("a.scores", vec![1.0_f32, -2.0])
        .metadata("a.types", vec![1_i32, 3])
        .metadata("a.flags", vec![true, false])
        .metadata(
            "a.nested",
            GgufValue::Array(GgufArray::Array(vec![
                GgufArray::U8(vec![1, 2]),
                GgufArray::Array(vec![GgufArray::I64(vec![-1])]),
            ])),
        );
    let mut sizes = Vec::new();
    for (name, dtype, shape) in [
        ("f32", DType::F32, &[3, 5][..]),
        ("f16", DType::F16, &[7]),
        ("q8", DType::Block(BlockFormat::Q8_0), &[2, 64]),
        ("q4", DType::Block(BlockFormat::Q4K), &[1, 256]),
        ("scalar", DType::F32, &[]),
    ] {
        writer.tensor(name, dtype, shape).unwrap();
        sizes.push(dtype.byte_len(shape.iter().product()).unwrap());
    }
    file_bytes(&writer, &sizes, 1)
}

fn parse(bytes: &[u8]) -> Result<GgufFile, Error> {
    GgufFile::from_bytes(bytes.to_vec(), "x.gguf")
}

#[test]
fn what_is_written_is_read() {
    let file = parse(&example()).unwrap();
    assert_eq!(file.get("a.u64").unwrap().as_u64(), Some(u64::MAX));
    assert_eq!(file.get("a.i16").unwrap().as_u64(), None);
    assert_eq!(file.get("a.f64").unwrap().as_f64(), Some(-1.5));
    assert_eq!(file.get("a.bool").unwrap().as_bool(), Some(true));
    assert_eq!(file.get("a.tokens").unwrap().as_strings().unwrap(), ["<s>", "ä", ""]);
    let GgufValue::Array(GgufArray::Array(nested)) = file.get("a.nested").unwrap() else {
        unreachable!("a nested array was written");
    };
    assert_eq!(nested[1], GgufArray::Array(vec![GgufArray::I64(vec![-1])]));
    let names: Vec<&str> = file.names().collect();
    assert_eq!(names, ["f16", "f32", "q4", "q8", "scalar"]);
    assert_eq!(file.tensor("f32").unwrap().shape(), [3, 5]);
    assert_eq!(file.tensor("scalar").unwrap().count(), 1);
    assert_eq!(file.tensor("f32").unwrap().to_f32().unwrap()[0], f32::from_bits(0x0101_0101));
    assert_eq!(file.tensor("q8").unwrap().to_f32().unwrap().len(), 128);
    assert!(matches!(file.tensor("none"), Err(Error::MissingTensor { .. })));
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = example();
    // The padding after the last tensor may be missing.
    let needed = bytes.len() - 28;
    for len in 0..needed {
        assert!(parse(&bytes[..len]).is_err(), "{len} of {} bytes", bytes.len());
    }
    assert!(parse(&bytes[..needed]).is_ok());
}

/// Returns a header with the given counts, followed by `rest`.
fn header(tensors: u64, values: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(values.to_le_bytes());
    rest.iter().for_each(|part| bytes.extend(*part));
    bytes
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

/// Returns the description of a tensor with one dimension.
fn tensor(name: &str, side: u64, kind: u32, offset: u64) -> Vec<u8> {
    let mut bytes = string(name);
    bytes.extend(1_u32.to_le_bytes());
    bytes.extend(side.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend(offset.to_le_bytes());
    bytes
}

#[test]
fn faults_are_named() {
    let data = [0; 256];
    let two = |a: &[u8], b: &[u8]| header(2, 0, &[a, b, &data]);
    let value = |kind: u32, value: &[u8]| {
        header(0, 1, &[&string("key"), &kind.to_le_bytes(), value, &data])
    };
    let mut big_endian = header(0, 0, &[]);
    big_endian[4..8].copy_from_slice(&3_u32.to_be_bytes());
    let mut version_1 = header(0, 0, &[]);
    version_1[4] = 1;
    let mut deep = Vec::new();
    for _ in 0..6 {
        deep.extend(9_u32.to_le_bytes());
        deep.extend(1_u64.to_le_bytes());
    }
    let alignment = [string("general.alignment"), 4_u32.to_le_bytes().to_vec()].concat();
    for (bytes, want) in [
        (b"GGML\0\0\0\0".to_vec(), "does not start with GGUF"),
        (big_endian, "big-endian"),
        (version_1, "version 1"),
        (header(u64::MAX, 0, &[&data]), "exceed"),
        (header(0, 1 << 40, &[&data]), "exceed"),
        (value(8, &u64::MAX.to_le_bytes()), "metadata \"key\": the file is truncated"),
        (value(13, &[]), "metadata \"key\": value type 13 is unknown"),
        (value(7, &[2]), "a boolean has the value 2"),
        (value(8, &[&3_u64.to_le_bytes()[..], &[0xFF; 3]].concat()), "UTF-8"),
        (value(9, &deep), "nested"),
        (
            value(9, &[&8_u32.to_le_bytes()[..], &(1_u64 << 60).to_le_bytes()].concat()),
            "metadata \"key\"",
        ),
        (
            header(0, 2, &[&string("k"), &[0; 5], &string("k"), &[0; 5]]),
            "metadata \"k\" is defined twice",
        ),
        (two(&tensor("a", 1, 0, 0), &tensor("a", 1, 0, 32)), "tensor \"a\" is defined twice"),
        (two(&tensor("a", 9, 0, 0), &tensor("b", 1, 0, 32)), "tensor \"b\" overlaps"),
        (two(&tensor("a", 1, 0, 0), &tensor("b", 1, 0, 4)), "tensor \"b\": offset 4"),
        (two(&tensor("a", 1, 0, 0), &tensor("b", 1, 0, 1 << 20)), "tensor \"b\": the file is"),
        (two(&tensor("a", 1 << 62, 0, 0), &tensor("b", 1, 0, 0)), "tensor \"a\": shape"),
        (two(&tensor("a", 33, 8, 0), &tensor("b", 1, 0, 0)), "whole blocks"),
        (
            header(0, 1, &[&alignment, &24_u32.to_le_bytes()]),
            "metadata general.alignment is 24 (u32), expected a u32 that is a power of two",
        ),
        (header(0, 1, &[&alignment, &0_u32.to_le_bytes()]), "power of two"),
    ] {
        let error = parse(&bytes).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{error}");
        assert!(error.to_string().contains(want), "{error}, expected {want}");
    }
    for (kind, name) in [(6, "Q5_0"), (13, "Q5_K"), (17, "IQ2_XS")] {
        let unsupported = parse(&two(&tensor("a", 1, kind, 0), &tensor("b", 1, 0, 32))).unwrap();
        let error = unsupported.tensor("a").unwrap_err().to_string();
        let want = format!("tensor a has type {name}, supported are F32, F16");
        assert!(error.contains(&want), "{error}");
        assert!(error.ends_with("get the model as a file of type Q8_0, Q6_K or F16"), "{error}");
        assert!(unsupported.tensor("b").is_ok());
    }
}

#[test]
fn tensors_have_the_alignment_of_the_metadata() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let mut writer = GgufWriter::new();
    writer.metadata("general.alignment", 4096_u32);
    writer.tensor("a", DType::F32, &[1]).unwrap();
    writer.tensor("b", DType::F32, &[1025]).unwrap();
    let bytes = file_bytes(&writer, &[4, 4100], 1);
    assert_eq!(bytes.len(), 4 * 4096);
    assert_eq!((bytes[4095], bytes[4096], bytes[8191], bytes[8192]), (0, 1, 0, 1));
    let value = f32::from_bits(0x0101_0101);
    assert_eq!(parse(&bytes).unwrap().tensor("b").unwrap().to_f32().unwrap(), [value; 1025]);

    for (alignment, want) in [
        (GgufValue::U32(97), "metadata general.alignment is 97 (u32), expected a u32 that is"),
        (GgufValue::U64(64), "metadata general.alignment is 64 (u64), expected a u32 that is"),
    ] {
        writer.metadata("general.alignment", alignment);
        let error = writer.write(&path, |_, _| unreachable!("nothing is written")).unwrap_err();
        assert!(error.to_string().contains(want), "{error}");
        assert!(!path.exists());
    }
}

#[test]
fn tensors_that_cannot_be_written_are_named() {
    let mut writer = GgufWriter::new();
    writer.tensor("a", DType::F32, &[2]).unwrap();
    for (name, dtype, shape, want) in [
        ("a", DType::F32, &[1][..], "already taken"),
        ("b", DType::U8, &[1], "no type U8"),
        ("b", DType::Block(BlockFormat::Q8_0), &[32, 33], "cannot have shape"),
        ("b", DType::F32, &[1, 1, 1, 1, 1], "cannot have shape"),
        ("b", DType::F32, &[usize::MAX, 2], "too large"),
    ] {
        let error = writer.tensor(name, dtype, shape).unwrap_err().to_string();
        assert!(error.contains(want) && error.contains(name), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let error = writer.write(&path, |_, out| Ok(out.write_all(&[0; 7])?)).unwrap_err();
    assert!(error.to_string().contains("7 bytes were written, expected 8"), "{error}");
    let error = writer.write(&path, |_, _| Err(Error::bad_file("source", "gone").into()));
    assert!(error.unwrap_err().to_string().contains("source"));
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
}

proptest! {
    #[test]
    fn any_metadata_survives_writing(
        texts in proptest::collection::vec(".{0,12}", 0..8),
        numbers in proptest::collection::vec(any::<u32>(), 0..40),
        key in "[a-z.]{1,20}",
        side in 0_usize..40,
    ) {
        let mut writer = GgufWriter::new();
        writer.metadata(key.clone(), texts.clone()).metadata("numbers", numbers.clone());
        writer.tensor("t", DType::Bf16, &[side, 3]).unwrap();
        let file = parse(&file_bytes(&writer, &[side * 6], 0)).unwrap();
        if key != "numbers" {
            prop_assert_eq!(file.get(&key).unwrap().as_strings().unwrap(), &texts);
        }
        prop_assert_eq!(file.get("numbers").unwrap(), &GgufValue::from(numbers));
        prop_assert_eq!(file.tensor("t").unwrap().shape(), &[side, 3]);
    }
}

/// Memory limit of the reader, in bytes per byte of input, and the constant part: a reader's
/// buffer and small maps.
const BYTES_PER_INPUT_BYTE: u64 = 64;
const CONSTANT_BYTES: u64 = 64 * 1024;

/// Reads one input. Returns an error that names the violated rule.
fn attempt(input: &[u8]) -> Result<(), String> {
    let mut verdict = Ok(());
    let used = allocation_counter::measure(|| {
        verdict = catch_unwind(AssertUnwindSafe(|| {
            let Ok(file) = GgufFile::from_bytes(input.to_vec(), Path::new("x.gguf")) else {
                return Ok(());
            };
            for name in file.names() {
                let Ok(tensor) = file.tensor(name) else { continue };
                let bytes = tensor.bytes().map_err(|error| error.to_string())?;
                if tensor.dtype().byte_len(tensor.count()) != Some(bytes.len()) {
                    return Err(format!("tensor {name} has {} bytes", bytes.len()));
                }
                if let Ok(tensor) = tensor.as_float() {
                    tensor.to_f32().map_err(|error| error.to_string())?;
                }
            }
            Ok(())
        }))
        .unwrap_or_else(|_| Err("the reader panicked".to_owned()));
    });
    verdict?;
    let allowed = CONSTANT_BYTES + BYTES_PER_INPUT_BYTE * input.len() as u64;
    if used.bytes_max > allowed {
        return Err(format!("{} bytes of memory for {} bytes", used.bytes_max, input.len()));
    }
    Ok(())
}

/// Returns a mutation of the example.
fn mutate(rng: &mut Rng, seed: &[u8]) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.usize(1..5) {
        let at = rng.usize(..=bytes.len());
        match rng.u8(..8) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, rng.u8(..)),
            2 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(..8),
            3 if at < bytes.len() => bytes[at] = *rng.choice(&[0, 1, 8, 9, 0x7F, 0xFF]).unwrap(),
            4 if at + 8 <= bytes.len() => {
                let edges = [0, 1, u64::MAX, 1 << 63, 1 << 32, 1 << 20, bytes.len() as u64];
                bytes[at..at + 8].copy_from_slice(&rng.choice(edges).unwrap().to_le_bytes());
            }
            5 => {
                let a = rng.usize(..=bytes.len());
                let b = rng.usize(..=bytes.len());
                let piece = bytes[a.min(b)..a.max(b)].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => {
                let cut = rng.usize(..=bytes.len());
                bytes.drain(at.min(cut)..at.max(cut));
            }
        }
        bytes.truncate(1 << 14);
    }
    bytes
}

fn run(seed: u64, mut done: impl FnMut(u64) -> bool) -> u64 {
    let example = example();
    let mut rng = Rng::with_seed(seed);
    let mut inputs = 0;
    while !done(inputs) {
        let input = mutate(&mut rng, &example);
        if let Err(error) = attempt(&input) {
            let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            unreachable!("{error}\n  seed {seed}\n  input (hex) {hex}");
        }
        inputs += 1;
    }
    inputs
}

#[test]
fn a_short_run_finds_nothing() {
    attempt(&example()).unwrap();
    run(0x6767_7566, |inputs| inputs == 3000);
}

/// Long run of `cargo xtask fuzz weights`, which sets the environment variables.
#[test]
#[ignore = "long; run by cargo xtask fuzz weights"]
fn a_long_run_finds_nothing() {
    #[expect(
        clippy::disallowed_methods,
        reason = "`cargo xtask fuzz` passes its options in variables"
    )]
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let seconds = number("TINKEX_FUZZ_SECONDS").unwrap_or(10);
    let seed = number("TINKEX_FUZZ_SEED").unwrap_or_else(|| Rng::new().u64(..));
    println!("fuzzing for {seconds} s with seed {seed}");
    let end = Instant::now() + Duration::from_secs(seconds);
    let inputs = run(seed, |_| Instant::now() >= end);
    println!("the reader did not fail on {inputs} inputs");
}
