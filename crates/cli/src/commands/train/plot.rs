//! The loss of a run as a picture, written by hand: SVG is text.

use std::fmt::Write as _;

use super::record::Record;

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 440.0;
/// Room for the axes.
const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 40.0;
const BOTTOM: f64 = 48.0;

/// The loss of a run as SVG.
#[expect(clippy::cast_precision_loss, reason = "places in a picture")]
pub(crate) fn svg(record: &Record, title: &str) -> String {
    let steps = record.steps.iter().map(|line| (line.step as f64, line.loss));
    let points: Vec<(f64, f64)> = steps.filter(|(_, loss)| loss.is_finite()).collect();
    let evals = record.evals.iter().map(|line| (line.step as f64, line.eval_loss));
    let evals: Vec<(f64, f64)> = evals.filter(|(_, loss)| loss.is_finite()).collect();
    let all = || points.iter().chain(&evals);
    let last = all().map(|(step, _)| *step).fold(1.0, f64::max);
    let most = all().map(|(_, loss)| *loss).fold(f64::MIN_POSITIVE, f64::max);
    let ticks = ticks(most);
    let top = ticks.last().copied().unwrap_or(most).max(most);
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * step / last;
    let y = |loss: f64| HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * loss / top;

    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#333\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
        escaped(title)
    );
    for tick in ticks {
        let (at, right) = (y(tick), WIDTH - RIGHT);
        let _ = writeln!(
            text,
            "<line x1=\"{LEFT}\" x2=\"{right}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 8.0,
            at + 4.0,
            short(tick)
        );
    }
    for part in 0..=4 {
        let step = (last * f64::from(part) / 4.0).round();
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{step}</text>",
            x(step),
            HEIGHT - BOTTOM + 20.0
        );
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">steps</text>",
        WIDTH.midpoint(LEFT - RIGHT),
        HEIGHT - 10.0
    );
    let line = |points: &[(f64, f64)], style: &str| {
        let places = points.iter().map(|(step, loss)| format!("{:.1},{:.1}", x(*step), y(*loss)));
        let places = places.collect::<Vec<_>>().join(" ");
        format!("<polyline fill=\"none\" {style} points=\"{places}\"/>\n")
    };
    text += &line(&points, "stroke=\"#9db8d9\" stroke-width=\"1\"");
    text += &line(&smooth(&points), "stroke=\"#1f5fa8\" stroke-width=\"2\"");
    text += &line(&evals, "stroke=\"#c8551b\" stroke-width=\"2\"");
    for (step, loss) in &evals {
        let _ = writeln!(
            text,
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"#c8551b\"/>",
            x(*step),
            y(*loss)
        );
    }
    let legend =
        [("#1f5fa8", "training loss", true), ("#c8551b", "held-out loss", !evals.is_empty())];
    let shown = legend.into_iter().filter(|(_, _, shown)| *shown);
    for (at, (colour, label, _)) in shown.enumerate() {
        let at = WIDTH - RIGHT - 120.0 * (2 - at) as f64;
        let _ = writeln!(
            text,
            "<rect x=\"{at}\" y=\"16\" width=\"14\" height=\"4\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"23\">{label}</text>",
            at + 20.0
        );
    }
    text + "</svg>\n"
}

/// Round numbers from 0 to at least `most`.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 5.0;
    let power = 10_f64.powf(rough.log10().floor());
    let fits = [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().find(|part| part * power >= rough);
    let step = fits.unwrap_or(10.0) * power;
    let mut ticks = vec![0.0];
    while let Some(last) = ticks.last().copied().filter(|last| *last < most && ticks.len() < 12) {
        ticks.push(last + step);
    }
    ticks
}

/// A mean that forgets, so that the way down is seen through the noise.
fn smooth(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    #[expect(clippy::cast_precision_loss, reason = "a count of points")]
    let keep = 1.0 - 1.0 / (points.len() as f64 / 20.0).clamp(1.0, 20.0);
    let mut mean = None;
    let next = |(step, loss): &(f64, f64)| {
        let now = mean.map_or(*loss, |before: f64| before * keep + loss * (1.0 - keep));
        mean = Some(now);
        (*step, now)
    };
    points.iter().map(next).collect()
}

fn short(number: f64) -> String {
    let text = format!("{number:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::record::{EvalLine, StepLine};
    use super::*;

    fn record(losses: &[f64]) -> Record {
        let line = |(step, loss): (usize, &f64)| StepLine {
            step: step as u64 + 1,
            epoch: 0.0,
            loss: *loss,
            learning_rate: 0.0,
            tokens: 1,
            tokens_per_second: 1.0,
        };
        let evals = vec![EvalLine { step: 1, eval_loss: 2.0 }];
        Record { steps: losses.iter().enumerate().map(line).collect(), evals, ..Record::default() }
    }

    #[test]
    fn every_point_is_within_the_picture() {
        for losses in [vec![], vec![0.0], vec![3.2, 1.5, f64::NAN, 0.2], vec![1e-9; 3], vec![4e7]] {
            let text = svg(&record(&losses), "a <b> & c");
            assert!(text.contains("a &lt;b&gt; &amp; c"));
            let places = text.split("points=\"").skip(1).flat_map(|rest| {
                rest.split('"').next().unwrap().split_whitespace().collect::<Vec<_>>()
            });
            for place in places {
                let (x, y) = place.split_once(',').unwrap();
                let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                assert!((LEFT..=WIDTH - RIGHT).contains(&x), "{place} of {losses:?}");
                assert!((TOP - 1.0..=HEIGHT - BOTTOM).contains(&y), "{place} of {losses:?}");
            }
        }
    }

    #[test]
    fn ticks_are_round_and_reach_the_top() {
        assert_eq!(ticks(4.3), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert!(*ticks(0.037).last().unwrap() >= 0.037);
    }
}
