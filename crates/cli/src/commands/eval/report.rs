//! [`EvalReport`]: the result of an evaluation, as a table and as JSON.

use serde::Serialize;
use tinkex::{Timestamp, TinkerPath};
use tinkex_runs::EvaluationLine;

use crate::format;
use crate::style::{GREEN, RED};
use crate::table::{Table, TableCell};

use super::scorer::AnswerScorer;

/// Result of an evaluation.
#[derive(Debug, Serialize)]
pub(super) struct EvalReport {
    /// Argument that named the model. The title has it, because paths are wider than a terminal.
    #[serde(skip)]
    argument: String,
    model: String,
    file: String,
    examples: usize,
    /// Number of tokens that the loss covers.
    tokens: u64,
    /// Mean loss per token.
    loss: f64,
    perplexity: f64,
    /// How answers were scored: the value of `--match`, or `judge`.
    scored_by: &'static str,
    /// Number of generated answers.
    answers: usize,
    /// Mean score of the answers; `None` without answers.
    pub(super) score: Option<f64>,
    results: Vec<EvaluatedExample>,
}

/// Result of an example.
#[derive(Debug, Serialize)]
pub(super) struct EvaluatedExample {
    /// Number of the example, from 1.
    pub(super) number: usize,
    /// Number of tokens that the loss covers.
    pub(super) tokens: u64,
    /// Mean loss per token.
    pub(super) loss: f64,
    /// Weight of the loss in the mean loss of the file.
    #[serde(skip)]
    pub(super) weight: f64,
    #[serde(flatten)]
    pub(super) answer: Option<EvaluatedAnswer>,
}

/// Generated answer of an example.
#[derive(Debug, Serialize)]
pub(super) struct EvaluatedAnswer {
    pub(super) prompt: String,
    pub(super) expected: String,
    pub(super) answer: String,
    pub(super) stop_reason: &'static str,
    pub(super) score: f64,
}

impl EvalReport {
    pub(super) fn new(
        argument: String,
        model: String,
        file: String,
        scorer: &AnswerScorer,
        results: Vec<EvaluatedExample>,
    ) -> Self {
        let weight: f64 = results.iter().map(|one| one.weight).sum();
        let loss = results.iter().map(|one| one.loss * one.weight).sum::<f64>() / weight;
        let scores: Vec<f64> =
            results.iter().filter_map(|one| Some(one.answer.as_ref()?.score)).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of answers")]
        let score = (!scores.is_empty()).then(|| scores.iter().sum::<f64>() / scores.len() as f64);
        Self {
            argument,
            model,
            file,
            examples: results.len(),
            tokens: results.iter().map(|one| one.tokens).sum(),
            loss,
            perplexity: loss.exp(),
            scored_by: scorer.name(),
            answers: scores.len(),
            score,
            results,
        }
    }

    /// Returns the line of the run folder for an evaluation of `checkpoint`.
    pub(super) fn line(&self, checkpoint: TinkerPath) -> EvaluationLine {
        EvaluationLine {
            time: Timestamp::now(),
            checkpoint,
            file: self.file.clone(),
            examples: self.examples as u64,
            tokens: self.tokens,
            loss: self.loss,
            scored_by: self.score.map(|_| self.scored_by.to_owned()),
            answers: self.answers as u64,
            score: self.score,
        }
    }

    pub(super) fn table(&self) -> Table {
        let mut title = format!(
            "{}: {}, loss {:.4}",
            self.argument,
            format::count(self.examples, "example"),
            self.loss
        );
        let is_judged = self.scored_by == "judge";
        if let Some(score) = self.score {
            if is_judged {
                title += &format!(", mean score {score:.3}");
            } else {
                let answers = self.results.iter().filter_map(|one| one.answer.as_ref());
                let matched = answers.filter(|answer| answer.score > 0.0).count();
                let all = format::count(self.answers, "answer");
                title += &format!(", {matched} of {all} match ({})", self.scored_by);
            }
        }
        let mut headers = vec!["#", "Loss"];
        if self.score.is_some() {
            let score = if is_judged { "Score" } else { "Match" };
            headers.extend([score, "Prompt", "Expected", "Answer"]);
        }
        let mut table = Table::new(headers)
            .title(title)
            .wrapped(&["Prompt", "Expected", "Answer"])
            .colored("Match", |text| Some(if text == "Yes" { GREEN } else { RED }));
        for one in &self.results {
            let number = |value: f64, digits: usize| {
                TableCell::with_value(format!("{value:.digits$}"), value.to_string())
            };
            let mut row = vec![TableCell::from(one.number.to_string()), number(one.loss, 4)];
            if let Some(answer) = &one.answer {
                row.push(if is_judged {
                    number(answer.score, 3)
                } else {
                    format::yes_no(answer.score > 0.0).into()
                });
                let texts = [&answer.prompt, &answer.expected, &answer.answer];
                row.extend(texts.map(|text| text.trim().into()));
            }
            table.row(row);
        }
        table
    }
}
