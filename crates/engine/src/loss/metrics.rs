//! [`LossMetrics`]: metrics of a batch trained with a built-in loss.

use super::token::LossSums;

/// Metrics of a batch. Add the data in batch order: the sums then have reproducible bits.
///
/// ```
/// use tinkex_engine::loss::LossMetrics;
///
/// assert_eq!(LossMetrics::default().named(), [("loss:sum".to_owned(), 0.0)]);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LossMetrics {
    data_count: usize,
    tokens: usize,
    loss: f64,
    weight: f64,
    /// Sum of the clipped fractions of all data, if the loss has clipping bounds.
    clipped: Option<f64>,
}

impl LossMetrics {
    /// Adds the result of a datum of `tokens` positions.
    pub fn add(&mut self, tokens: usize, sums: &LossSums) {
        self.data_count += 1;
        self.tokens += tokens;
        self.loss += sums.loss;
        self.weight += sums.weight;
        if let Some(fraction) = sums.clipped_fraction {
            *self.clipped.get_or_insert(0.0) += fraction;
        }
    }

    /// Returns the loss, summed over the batch.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// Returns names and values. The suffix of a name, `:sum` or `:mean`, states how the values of
    /// several batches are combined.
    ///
    /// An empty batch reports only its loss: the mean of no values is undefined.
    #[must_use]
    pub fn named(&self) -> Vec<(String, f64)> {
        let mut all = vec![("loss:sum".to_owned(), self.loss)];
        if self.data_count > 0 {
            all.push(("tokens:sum".to_owned(), self.tokens as f64));
            all.push(("weight:sum".to_owned(), self.weight));
            if let Some(clipped) = self.clipped {
                all.push(("ratio_clipped:mean".to_owned(), clipped / self.data_count as f64));
            }
        }
        all
    }
}
