//! [`RotaryAngles`]: cosines and sines of the rotary position embedding for the rows of a batch.

use super::Model;

/// Cosines and sines of the rotary angles, `head_dim / 2` of each per row.
#[derive(Debug, Default)]
pub(crate) struct RotaryAngles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl RotaryAngles {
    /// Computes the angles of rows at these positions.
    pub(crate) fn fill(&mut self, model: &Model, positions: impl Iterator<Item = usize>) {
        self.half = model.frequencies.len();
        self.cos.clear();
        self.sin.clear();
        #[expect(clippy::cast_possible_truncation, reason = "the factor is near 1")]
        let factor = model.config.rope.attention_factor() as f32;
        for position in positions {
            #[expect(clippy::cast_precision_loss, reason = "contexts are shorter than 2²⁴")]
            let position = position as f32;
            for frequency in &model.frequencies {
                // The angle is rounded to f32, as in `transformers`; its sine and cosine are
                // computed in f64.
                let (sin, cos) = f64::from(position * frequency).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "activations are f32")]
                {
                    self.cos.push(cos as f32 * factor);
                    self.sin.push(sin as f32 * factor);
                }
            }
        }
    }

    /// Returns the cosines and sines of one row.
    pub(crate) fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let range = row * self.half..(row + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
