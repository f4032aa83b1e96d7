//! Block formats compared with PyPI `gguf` and llama.cpp; see `tests/golden/record.py`.

use std::path::Path;

use tinkex_weights::{BlockFormat, TensorFile};

/// The recorded blocks and weights of one format.
struct Recorded {
    blocks: Vec<u8>,
    values: Vec<f32>,
    source: Vec<f32>,
    encoded: Vec<u8>,
}

fn recorded(format: BlockFormat) -> Recorded {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/quants.safetensors");
    let file = TensorFile::open(path).unwrap();
    let name = format.name().to_lowercase();
    let tensor = |part: &str| file.tensor(&format!("{name}.{part}")).unwrap();
    Recorded {
        blocks: tensor("blocks").bytes().unwrap(),
        values: tensor("values").to_f32().unwrap(),
        source: tensor("source").to_f32().unwrap(),
        encoded: tensor("encoded").bytes().unwrap(),
    }
}

fn decode(format: BlockFormat, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![0.0; bytes.len() / format.block_bytes() * format.block_len()];
    format.decode(bytes, &mut out);
    out
}

fn encode(format: BlockFormat, values: &[f32]) -> Vec<u8> {
    let mut out = vec![0; format.byte_len(values.len()).unwrap()];
    format.encode(values, &mut out);
    out
}

#[test]
fn decoded_weights_have_the_bits_of_gguf() {
    for format in BlockFormat::ALL {
        let Recorded { blocks, values, .. } = recorded(format);
        let decoded = decode(format, &blocks);
        assert_eq!(decoded.len(), values.len());
        for (i, (got, want)) in decoded.iter().zip(&values).enumerate() {
            assert_eq!(got.to_bits(), want.to_bits(), "{}: {got}, {want} at {i}", format.name());
        }
    }
}

#[test]
fn simple_formats_encode_to_the_bytes_of_gguf() {
    for format in [BlockFormat::Q8_0, BlockFormat::Q4_0] {
        let Recorded { source, encoded, .. } = recorded(format);
        assert!(encode(format, &source) == encoded, "{}", format.name());
    }
}

/// The searches for scales break ties of the weighted error by rounding, so that single rows may
/// be better or worse than the rows of llama.cpp.
#[test]
fn k_quants_are_as_accurate_as_those_of_llama_cpp() {
    for (format, bound) in [(BlockFormat::Q4K, 0.1), (BlockFormat::Q6K, 0.04)] {
        let Recorded { source, encoded, .. } = recorded(format);
        let ours = decode(format, &encode(format, &source));
        let theirs = decode(format, &encoded);
        let rows = source.chunks(256).zip(ours.chunks(256)).zip(theirs.chunks(256));
        let mut own_total = 0.0;
        let mut peer_total = 0.0;
        for (row, ((source, ours), theirs)) in rows.enumerate() {
            // All zeros, and weights whose scales are below the range of f16.
            if [2, 7].contains(&row) {
                assert_eq!(ours, theirs);
                continue;
            }
            let own = relative_error(source, ours);
            own_total += own;
            peer_total += relative_error(source, theirs);
            assert!(own <= bound, "{} row {row}: error {own}", format.name());
        }
        let name = format.name();
        assert!(own_total <= 1.02 * peer_total, "{name}: {own_total}, llama.cpp {peer_total}");
    }
}

/// Returns the norm of the error relative to the norm of `source`.
fn relative_error(source: &[f32], decoded: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f32>| {
        values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
    };
    norm(&mut source.iter().zip(decoded).map(|(a, b)| a - b)) / norm(&mut source.iter().copied())
}
