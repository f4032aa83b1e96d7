//! Encodes the progress of a pass, so that a later process can continue the pass.
//!
//! All numbers are little-endian. The header identifies the division of the data into trees: bytes
//! of a pass with another division are refused. The caller must ensure that the tokens and the
//! weights are the same.

use super::objective::DatumLoss;
use super::pass::PassProgress;
use crate::loss::LossSums;

/// Version of the format. Changes when the meaning of the bytes changes.
const VERSION: u64 = 1;

/// Tag of the loss of a datum.
const LOSS: u64 = 0;
const CLIPPED_LOSS: u64 = 1;
const CUSTOM_LOSS: u64 = 2;

impl PassProgress {
    /// Encodes the data that are done: their log-probabilities, losses and gradients.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(self.encoded_size()));
        self.header().iter().for_each(|number| out.number(*number));
        out.number(self.done as u64);
        for index in self.trees[..self.done].iter().flat_map(|tree| &tree.sequences) {
            out.floats(&self.logprobs[*index]);
            match &self.losses[*index] {
                Some(DatumLoss::Loss(LossSums { loss, weight, clipped_fraction })) => {
                    out.number(clipped_fraction.map_or(LOSS, |_| CLIPPED_LOSS));
                    out.double(*loss);
                    out.double(*weight);
                    clipped_fraction.iter().for_each(|fraction| out.double(*fraction));
                }
                Some(DatumLoss::Graph { loss, metrics }) => {
                    out.number(CUSTOM_LOSS);
                    out.double(*loss);
                    out.number(metrics.len() as u64);
                    for (name, value) in metrics {
                        out.bytes(name.as_bytes());
                        out.double(*value);
                    }
                }
                None => unreachable!("a datum of a tree that is done has a loss"),
            }
        }
        if let Some(gradients) = &self.gradients {
            gradients.tensors().for_each(|values| out.floats(values));
        }
        out.0
    }

    /// Estimates the length of [`to_bytes`](Self::to_bytes) in bytes.
    #[must_use]
    pub fn encoded_size(&self) -> usize {
        let gradients = self.gradients.iter().flat_map(|gradients| gradients.tensors());
        let floats = gradients.chain(&self.logprobs).map(|values| 8 + 4 * values.len());
        floats.sum::<usize>() + 32 * self.losses.len()
    }

    /// Continues from the progress that [`to_bytes`](Self::to_bytes) encoded for the same data.
    /// `self` is the new pass, of which nothing is done. Returns `None` if the bytes belong to
    /// another pass or are malformed.
    ///
    /// The values themselves are not checked: the caller must detect damaged bytes.
    #[must_use]
    pub fn continued(mut self, bytes: &[u8]) -> Option<Self> {
        let mut input = Reader(bytes);
        for expected in self.header() {
            if input.number()? != expected {
                return None;
            }
        }
        self.done = input.length().filter(|done| *done <= self.trees.len())?;
        for index in self.trees[..self.done].iter().flat_map(|tree| &tree.sequences) {
            self.logprobs[*index] = input.floats()?;
            self.losses[*index] = Some(match input.number()? {
                tag @ (LOSS | CLIPPED_LOSS) => {
                    let loss = input.double()?;
                    let weight = input.double()?;
                    let clipped_fraction =
                        if tag == CLIPPED_LOSS { Some(input.double()?) } else { None };
                    DatumLoss::Loss(LossSums { loss, weight, clipped_fraction })
                }
                CUSTOM_LOSS => {
                    let loss = input.double()?;
                    let mut metrics = Vec::new();
                    for _ in 0..input.length()? {
                        let name = String::from_utf8(input.bytes()?.to_vec()).ok()?;
                        metrics.push((name, input.double()?));
                    }
                    DatumLoss::Graph { loss, metrics }
                }
                _ => return None,
            });
        }
        for tensor in self.gradients.iter_mut().flat_map(|gradients| gradients.tensors_mut()) {
            let values = input.floats().filter(|values| values.len() == tensor.len())?;
            *tensor = values;
        }
        input.0.is_empty().then_some(self)
    }

    /// Returns the numbers that the bytes of two passes must have in common: version, number of
    /// data, whether gradients are computed, and a hash of the trees.
    fn header(&self) -> [u64; 4] {
        // A variant of FNV-1a over 64-bit words, which is stable across machines and versions.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        let mut add = |number: usize| {
            hash = (hash ^ number as u64).wrapping_mul(0x0100_0000_01b3);
        };
        for tree in &self.trees {
            add(tree.rows);
            tree.sequences.iter().for_each(|index| add(*index));
        }
        self.tokens.iter().for_each(|tokens| add(*tokens));
        [VERSION, self.tokens.len() as u64, u64::from(self.gradients.is_some()), hash]
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn number(&mut self, number: u64) {
        self.0.extend_from_slice(&number.to_le_bytes());
    }

    fn double(&mut self, number: f64) {
        self.number(number.to_bits());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn floats(&mut self, values: &[f32]) {
        self.number(values.len() as u64);
        values.iter().for_each(|value| self.0.extend_from_slice(&value.to_le_bytes()));
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u64> {
        self.take(8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn length(&mut self) -> Option<usize> {
        usize::try_from(self.number()?).ok()
    }

    fn double(&mut self) -> Option<f64> {
        self.number().map(f64::from_bits)
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.length()?;
        self.take(length)
    }

    fn floats(&mut self) -> Option<Vec<f32>> {
        let length = self.length()?.checked_mul(4)?;
        let (values, _) = self.take(length)?.as_chunks::<4>();
        Some(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_another_pass_and_truncated_bytes_are_refused() {
        let new = |rows: &[&[u32]]| PassProgress::new(rows, None);
        let rows: [&[u32]; 2] = [&[1, 2], &[3]];
        let mut pass = new(&rows);
        let batch = pass.next(usize::MAX).unwrap();
        let sums = LossSums { loss: 1.5, weight: 2.0, clipped_fraction: Some(0.25) };
        let custom = DatumLoss::Graph { loss: -0.5, metrics: vec![("a".to_owned(), 3.0)] };
        pass.record(&batch, vec![vec![0.5, -0.0], vec![1.0]], vec![DatumLoss::Loss(sums), custom]);
        let bytes = pass.to_bytes();
        let again = new(&rows).continued(&bytes).unwrap();
        assert_eq!(again.to_bytes(), bytes);
        assert!(again.next(usize::MAX).is_none());
        assert_eq!(again.into_output(), pass.into_output());
        for end in 0..bytes.len() {
            assert!(new(&rows).continued(&bytes[..end]).is_none(), "{end} bytes");
        }
        assert!(new(&rows).continued(&[&bytes[..], &[0]].concat()).is_none());
        assert!(new(&[&[1, 2], &[3, 4]]).continued(&bytes).is_none());
        assert!(new(&[&[1, 2]]).continued(&bytes).is_none());
    }
}
