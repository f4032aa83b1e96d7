//! Seeds: any whole number of 64 bits. One below zero stands for its bits.

use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum Whole {
    Unsigned(u64),
    Signed(i64),
}

pub(crate) fn read<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<Whole>::deserialize(from)?.map(|whole| match whole {
        Whole::Unsigned(seed) => seed,
        Whole::Signed(seed) => seed.cast_unsigned(),
    }))
}

#[cfg(test)]
mod tests {
    use crate::{LoraConfig, SamplingParams};

    #[test]
    fn a_seed_below_zero_is_a_seed() {
        let params: SamplingParams = serde_json::from_str(r#"{"seed": -1}"#).unwrap();
        assert_eq!(params.seed, Some(u64::MAX));
        let lora: LoraConfig = serde_json::from_str(r#"{"rank": 4, "seed": -2}"#).unwrap();
        assert_eq!(lora.seed, Some(u64::MAX - 1));
        for (text, seed) in
            [("7", Some(7)), ("null", None), ("18446744073709551615", Some(u64::MAX))]
        {
            let read: SamplingParams =
                serde_json::from_str(&format!("{{\"seed\": {text}}}")).unwrap();
            assert_eq!(read.seed, seed);
        }
        for text in ["1.5", "\"7\"", "18446744073709551616", "-9223372036854775809"] {
            let read = serde_json::from_str::<SamplingParams>(&format!("{{\"seed\": {text}}}"));
            assert!(read.is_err(), "{text}");
        }
    }
}
