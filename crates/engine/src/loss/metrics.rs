//! What a batch reports besides log-probabilities.

use super::token::Evaluated;

/// What is reported of a batch; data are added in their order.
///
/// ```
/// use tinkex_engine::loss::Metrics;
///
/// assert_eq!(Metrics::default().named(), [("loss:sum".to_owned(), 0.0)]);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics {
    data: usize,
    tokens: usize,
    loss: f64,
    weight: f64,
    clipped: Option<f64>,
}

impl Metrics {
    /// Adds a datum of `tokens` positions.
    pub fn add(&mut self, tokens: usize, out: &Evaluated) {
        self.data += 1;
        self.tokens += tokens;
        self.loss += out.sum;
        self.weight += out.weight;
        if let Some(share) = out.clipped {
            *self.clipped.get_or_insert(0.0) += share;
        }
    }

    /// The loss of the batch.
    #[must_use]
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// Names and values. The part of a name after the colon says how batches are put together.
    ///
    /// An empty batch has its loss and nothing else: a mean of nothing is not a number.
    #[must_use]
    pub fn named(&self) -> Vec<(String, f64)> {
        let mut all = vec![("loss:sum".to_owned(), self.loss)];
        if self.data > 0 {
            all.push(("tokens:sum".to_owned(), self.tokens as f64));
            all.push(("weight:sum".to_owned(), self.weight));
            if let Some(clipped) = self.clipped {
                all.push(("ratio_clipped:mean".to_owned(), clipped / self.data as f64));
            }
        }
        all
    }
}
