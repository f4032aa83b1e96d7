//! Built-in rewards, and the choice between them and a program.

use std::str::FromStr;

use regex::Regex;
use serde_json::Value;
use tinkex_recipes::rl::{Completion, RlPrompt};
use tinkex_runs::RewardSettings;

use crate::error::CommandError;

/// Value of `--reward`.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RewardOption {
    BuiltIn(BuiltInReward),
    /// Shell command.
    Program(String),
}

/// Built-in reward.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum BuiltInReward {
    /// 1 if the completion equals the field `answer`, without surrounding white space.
    Exact,
    /// 1 if the pattern, or else the field `pattern`, matches somewhere in the completion.
    Regex(Option<String>),
    /// 1 if the last number of the completion equals the field `answer`.
    Number,
    /// 1 for this number of characters, or else for the number in the field `length`; less the
    /// further the length is from the number, and 0 from twice the number on.
    Length(Option<u32>),
}

impl FromStr for RewardOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.splitn(2, ':');
        let name = parts.next().unwrap_or_default();
        let value = parts.next();
        Ok(Self::BuiltIn(match (name, value) {
            ("exact", None) => BuiltInReward::Exact,
            ("number", None) => BuiltInReward::Number,
            ("regex", None) => BuiltInReward::Regex(None),
            ("regex", Some(pattern)) => {
                Regex::new(pattern).map_err(|error| format!("invalid pattern: {error}"))?;
                BuiltInReward::Regex(Some(pattern.to_owned()))
            }
            ("length", None) => BuiltInReward::Length(None),
            ("length", Some(length)) => match length.parse() {
                Ok(length) if length > 0 => BuiltInReward::Length(Some(length)),
                _ => return Err("expected a number of characters, such as length:80".to_owned()),
            },
            _ if text.trim().is_empty() => return Err("expected a reward".to_owned()),
            _ => return Ok(Self::Program(text.to_owned())),
        }))
    }
}

impl From<&RewardOption> for RewardSettings {
    fn from(reward: &RewardOption) -> Self {
        match reward {
            RewardOption::BuiltIn(BuiltInReward::Exact) => Self::Exact,
            RewardOption::BuiltIn(BuiltInReward::Number) => Self::Number,
            RewardOption::BuiltIn(BuiltInReward::Regex(pattern)) => {
                Self::Regex { pattern: pattern.clone() }
            }
            RewardOption::BuiltIn(BuiltInReward::Length(characters)) => {
                Self::Length { characters: *characters }
            }
            RewardOption::Program(command) => Self::Program { command: command.clone() },
        }
    }
}

impl TryFrom<&RewardSettings> for RewardOption {
    type Error = CommandError;

    fn try_from(reward: &RewardSettings) -> Result<Self, CommandError> {
        Ok(match reward {
            RewardSettings::Exact => Self::BuiltIn(BuiltInReward::Exact),
            RewardSettings::Number => Self::BuiltIn(BuiltInReward::Number),
            RewardSettings::Regex { pattern } => {
                Self::BuiltIn(BuiltInReward::Regex(pattern.clone()))
            }
            RewardSettings::Length { characters } => {
                Self::BuiltIn(BuiltInReward::Length(*characters))
            }
            RewardSettings::Program { command } => Self::Program(command.clone()),
            _ => {
                let message = "the reward of the run is a function of the program that started it";
                return Err(CommandError::usage(message)
                    .hint("Resume the run with that program, or start a new run with --from."));
            }
        })
    }
}

impl BuiltInReward {
    /// Checks that every prompt has the field that the reward reads.
    pub(super) fn check(&self, prompts: &[RlPrompt]) -> Result<(), CommandError> {
        let (field, alternative) = match self {
            Self::Exact | Self::Number => ("answer", ""),
            Self::Regex(None) => ("pattern", ", or pass --reward regex:PATTERN"),
            Self::Length(None) => ("length", ", or pass --reward length:CHARACTERS"),
            Self::Regex(Some(_)) | Self::Length(Some(_)) => return Ok(()),
        };
        let is_valid = |prompt: &RlPrompt| match self {
            Self::Exact => prompt.metadata.get(field).is_some_and(|value| text(value).is_some()),
            Self::Number => number_field(prompt).is_some(),
            Self::Regex(_) => pattern_field(prompt).is_some_and(|text| Regex::new(text).is_ok()),
            Self::Length(_) => length_field(prompt).is_some(),
        };
        match prompts.iter().find(|prompt| !is_valid(prompt)) {
            None => Ok(()),
            Some(prompt) => {
                let message = format!(
                    "the reward needs the field {field:?} in every line; the line of {:?} has none \
                     that is valid",
                    prompt.text
                );
                let hint = format!("Add the field to the line{alternative}.");
                Err(CommandError::usage(message).hint(hint))
            }
        }
    }

    /// Returns the reward as a function of a completion.
    pub(super) fn function(&self) -> impl Fn(&Completion) -> f64 + Send + Sync + 'static {
        let fixed = match self {
            Self::Regex(Some(pattern)) => Regex::new(pattern).ok(),
            _ => None,
        };
        let reward = self.clone();
        move |completion: &Completion| match &reward {
            Self::Exact => {
                let answer = completion.prompt.metadata.get("answer").and_then(text);
                one_if(answer.is_some_and(|answer| answer.trim() == completion.text.trim()))
            }
            Self::Number => {
                let answer = number_field(&completion.prompt);
                one_if(answer.is_some() && last_number(&completion.text) == answer)
            }
            Self::Regex(_) => {
                let own = || Regex::new(pattern_field(&completion.prompt)?).ok();
                let pattern = fixed.clone().or_else(own);
                one_if(pattern.is_some_and(|pattern| pattern.is_match(&completion.text)))
            }
            Self::Length(length) => {
                let Some(wanted) = length.or_else(|| length_field(&completion.prompt)) else {
                    return 0.0;
                };
                let length = u32::try_from(completion.text.trim().chars().count());
                let distance = f64::from(length.unwrap_or(u32::MAX).abs_diff(wanted));
                (1.0 - distance / f64::from(wanted)).max(0.0)
            }
        }
    }
}

fn one_if(success: bool) -> f64 {
    f64::from(u8::from(success))
}

/// Returns a string or a number as text.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn number_field(prompt: &RlPrompt) -> Option<f64> {
    let value = prompt.metadata.get("answer")?;
    value.as_f64().or_else(|| last_number(value.as_str()?))
}

fn pattern_field(prompt: &RlPrompt) -> Option<&str> {
    prompt.metadata.get("pattern")?.as_str()
}

fn length_field(prompt: &RlPrompt) -> Option<u32> {
    let length = u32::try_from(prompt.metadata.get("length")?.as_u64()?).ok()?;
    (length > 0).then_some(length)
}

/// Returns the last number of a text, such as `-1,234.5`.
pub(crate) fn last_number(text: &str) -> Option<f64> {
    let mut found = None;
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if !bytes[at].is_ascii_digit() {
            at += 1;
            continue;
        }
        let mut end = at;
        let digit = |index: usize| bytes.get(index).is_some_and(u8::is_ascii_digit);
        while digit(end) || matches!(bytes.get(end), Some(b'.' | b',')) && digit(end + 1) {
            end += 1;
        }
        let negative =
            at > 0 && bytes[at - 1] == b'-' && (at == 1 || !bytes[at - 2].is_ascii_alphanumeric());
        let digits = text[at..end].replace(',', "");
        if let Ok(number) = digits.parse::<f64>() {
            found = Some(if negative { -number } else { number });
        }
        at = end;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_number_is_found() {
        for (text, number) in [
            ("2 + 2 = 4.", Some(4.0)),
            ("It costs 1,234.50 in total", Some(1234.5)),
            ("from 7 to -3", Some(-3.0)),
            ("a range of 3-5", Some(5.0)),
            ("no digits", None),
            ("v1.2.3", None),
        ] {
            assert_eq!(last_number(text), number, "{text}");
        }
    }

    #[test]
    fn rewards_are_parsed_and_survive_the_run_folder() {
        for text in ["exact", "number", "regex", "regex:^a:b$", "length", "length:80", "./r.py -x"]
        {
            let reward: RewardOption = text.parse().unwrap();
            let stored = RewardSettings::from(&reward);
            assert_eq!(RewardOption::try_from(&stored).unwrap(), reward, "{text}");
        }
        assert!(RewardOption::try_from(&RewardSettings::Custom).is_err());
        assert_eq!("./r.py".parse(), Ok(RewardOption::Program("./r.py".to_owned())));
        for text in ["regex:(", "length:x", "length:0", " "] {
            assert!(text.parse::<RewardOption>().is_err(), "{text}");
        }
    }

    #[test]
    fn missing_fields_are_reported() {
        let prompts = [RlPrompt::text("a").with("answer", 1), RlPrompt::text("b")];
        let error = BuiltInReward::Number.check(&prompts).unwrap_err();
        assert!(format!("{error:?}").contains("\\\"answer\\\""), "{error:?}");
        BuiltInReward::Regex(Some("x".to_owned())).check(&prompts).unwrap();
        BuiltInReward::Exact.check(&prompts[..1]).unwrap();
    }
}
