//! [`RandomSource`]: ids, names and seeds that the server chooses.

use parking_lot::Mutex;
use uuid::{Builder, Uuid};

/// Source of random ids. All ids that outlive a request come from it.
pub enum RandomSource {
    /// The operating system.
    System,
    /// A generator with this state, for simulations: equal seeds give equal ids.
    Seeded(Mutex<u64>),
}

impl RandomSource {
    pub fn seeded(seed: u64) -> Self {
        Self::Seeded(Mutex::new(seed))
    }

    /// Returns a random UUID (version 4).
    pub fn uuid(&self) -> Uuid {
        match self {
            Self::System => Uuid::new_v4(),
            Self::Seeded(state) => {
                let mut state = state.lock();
                let high = split_mix(&mut state);
                let low = split_mix(&mut state);
                let random = (u128::from(high) << 64) | u128::from(low);
                Builder::from_random_bytes(random.to_be_bytes()).into_uuid()
            }
        }
    }

    /// Returns the hexadecimal digits of a random UUID.
    pub fn id(&self) -> String {
        self.uuid().simple().to_string()
    }
}

/// Advances a SplitMix64 generator and returns its next number.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_ids() {
        let ids = |source: RandomSource| [source.id(), source.id()];
        let [first, second] = ids(RandomSource::seeded(1));
        assert_eq!(ids(RandomSource::seeded(1)), [first.clone(), second.clone()]);
        assert_ne!(first, second);
        assert!(!ids(RandomSource::seeded(2)).contains(&first));
        assert!(!ids(RandomSource::System).contains(&first));
    }
}
