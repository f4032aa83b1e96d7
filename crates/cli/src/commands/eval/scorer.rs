//! [`AnswerScorer`]: compares a generated answer with the expected one.

use std::str::FromStr;

use regex::Regex;
use tinkex_recipes::RewardProgram;
use tinkex_recipes::rl::{Completion, RlPrompt};

use crate::commands::rl::rewards::last_number;
use crate::error::{CommandError, Exit};

use super::report::EvaluatedAnswer;

/// Value of `--match`.
#[derive(Clone, Debug)]
pub(super) enum AnswerMatch {
    /// The answer equals the expected one.
    Exact,
    /// The answer contains the expected one.
    Contains,
    /// The last numbers of both are equal.
    Number,
    /// The expected answer is a pattern that matches somewhere in the answer.
    ExpectedPattern,
    /// The pattern matches somewhere in the answer.
    Pattern(Regex),
}

impl FromStr for AnswerMatch {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match (text, text.strip_prefix("regex:")) {
            ("exact", _) => Ok(Self::Exact),
            ("contains", _) => Ok(Self::Contains),
            ("number", _) => Ok(Self::Number),
            ("regex", _) => Ok(Self::ExpectedPattern),
            (_, Some(pattern)) => {
                Regex::new(pattern).map(Self::Pattern).map_err(|e| format!("invalid pattern: {e}"))
            }
            _ => Err("expected exact, contains, number, regex or regex:PATTERN".to_owned()),
        }
    }
}

impl AnswerMatch {
    fn name(&self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Contains => "contains",
            Self::Number => "number",
            Self::ExpectedPattern | Self::Pattern(_) => "regex",
        }
    }

    /// Returns whether the answer matches. White space around both texts is ignored, and so is the
    /// reasoning before an answer.
    fn matches(&self, expected: &str, answer: &str) -> Result<bool, CommandError> {
        let expected = final_answer(expected);
        let answer = final_answer(answer);
        Ok(match self {
            Self::Exact => answer == expected,
            Self::Contains => answer.contains(expected),
            Self::Number => {
                let number = last_number(expected);
                number.is_some() && last_number(answer) == number
            }
            Self::Pattern(pattern) => pattern.is_match(answer),
            Self::ExpectedPattern => {
                let pattern = Regex::new(expected).map_err(|error| {
                    CommandError::usage(format!("invalid pattern {expected:?}: {error}"))
                        .hint("With --match regex, every expected answer must be a pattern.")
                })?;
                pattern.is_match(answer)
            }
        })
    }
}

/// Returns the text after the reasoning of a model, without white space around it.
fn final_answer(text: &str) -> &str {
    text.rsplit_once("</think>").map_or(text, |(_, answer)| answer).trim()
}

/// Scores answers.
pub(super) enum AnswerScorer {
    Match(AnswerMatch),
    Judge(RewardProgram),
}

impl AnswerScorer {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Match(matching) => matching.name(),
            Self::Judge(_) => "judge",
        }
    }

    /// Returns the score of an answer: 0 or 1 of a match, or the number of the judge.
    pub(super) async fn score(&self, answer: &EvaluatedAnswer) -> Result<f64, CommandError> {
        match self {
            Self::Match(matching) => {
                let matches = matching.matches(&answer.expected, &answer.answer)?;
                Ok(f64::from(u8::from(matches)))
            }
            Self::Judge(program) => {
                let prompt = RlPrompt::text(&*answer.prompt).with("answer", &*answer.expected);
                let completion = Completion::new(prompt, &*answer.answer);
                let failed = |error: String| CommandError::new(Exit::Failed, error);
                let reward = program.score(&completion).await;
                let reward = reward.map_err(|error| {
                    // The judge runs as a reward program, and errors call it that.
                    failed(error.to_string().replacen("reward program", "judge", 1))
                });
                let value = reward?.value;
                if !value.is_finite() {
                    return Err(failed(format!("the judge returned {value}, not a finite number")));
                }
                Ok(value)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(how: &str, expected: &str, answer: &str) -> bool {
        how.parse::<AnswerMatch>().unwrap().matches(expected, answer).unwrap()
    }

    #[test]
    fn answers_match_in_different_ways() {
        for (how, expected, answer, result) in [
            ("exact", " Paris. ", "Paris.\n", true),
            ("exact", "Paris.", "It is Paris.", false),
            ("exact", "<think>\n\n</think>\n\nParis.", "<think>France?</think>Paris.", true),
            ("contains", "Paris", "It is Paris.", true),
            ("number", "1,234", "The sum is 1234", true),
            ("number", "none", "none", false),
            ("regex", "^[Pp]aris", "paris, France", true),
            ("regex:^(yes|no)$", "ignored", "no", true),
            ("regex:^(yes|no)$", "ignored", "perhaps", false),
        ] {
            assert_eq!(matches(how, expected, answer), result, "{how} {expected:?} {answer:?}");
        }
    }

    #[test]
    fn invalid_patterns_are_reported() {
        for wrong in ["fuzzy", "regex:(", ""] {
            assert!(wrong.parse::<AnswerMatch>().is_err(), "{wrong}");
        }
        let error = AnswerMatch::ExpectedPattern.matches("(", "x").unwrap_err();
        assert!(error.to_string().contains("invalid pattern"), "{error}");
    }
}
