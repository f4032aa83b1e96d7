//! Decoding of seeds. A negative seed is reinterpreted as an unsigned 64-bit integer.

use serde::{Deserialize, Deserializer};

#[derive(Deserialize)]
#[serde(untagged)]
enum SeedNumber {
    Unsigned(u64),
    Signed(i64),
}

pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    Ok(Option::<SeedNumber>::deserialize(from)?.map(|number| match number {
        SeedNumber::Unsigned(seed) => seed,
        SeedNumber::Signed(seed) => seed.cast_unsigned(),
    }))
}

#[cfg(test)]
mod tests {
    use crate::{LoraConfig, SamplingParams};

    #[test]
    fn negative_seeds_are_reinterpreted_as_unsigned() {
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
