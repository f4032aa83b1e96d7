//! Computing a traced loss and its gradient here, where the server does not.

use super::array::Array;
use super::step::{Operand, Step, larger};

/// The value of every step, for one datum.
///
/// # Errors
/// If two operands do not fit each other.
pub(super) fn forward(steps: &[Step], inputs: Vec<Array>) -> Result<Vec<Array>, String> {
    let mut inputs: Vec<Option<Array>> = inputs.into_iter().map(Some).collect();
    let mut values: Vec<Array> = Vec::with_capacity(steps.len());
    for step in steps {
        let misfit = |a: &Array, b: &Array| {
            format!(
                "{}x{} numbers do not fit {}x{}",
                a.size.rows, a.size.cols, b.size.rows, b.size.cols
            )
        };
        let get = |operand: &Operand| match operand {
            Operand::Step(at) => values[*at].clone(),
            Operand::Number(number) => Array::scalar(*number),
        };
        let value = match step {
            Step::Input(at) => inputs[*at].take().expect("each input is read once"),
            Step::One(one, x) => one.run(&values[*x]),
            Step::Two(two, a, b) => {
                let (a, b) = (get(a), get(b));
                two.run(&a, &b).ok_or_else(|| misfit(&a, &b))?
            }
            Step::Clamp(x, low, high) => values[*x].map(|x| clamped(x, *low, *high)),
            Step::Where(condition, yes, no) => {
                let (condition, yes, no) = (&values[*condition], get(yes), get(no));
                let taken =
                    condition.zip(&yes, |condition, yes| if condition == 0.0 { 0.0 } else { yes });
                let left =
                    condition.zip(&no, |condition, no| if condition == 0.0 { no } else { 0.0 });
                let (taken, left) = (
                    taken.ok_or_else(|| misfit(condition, &yes))?,
                    left.ok_or_else(|| misfit(condition, &no))?,
                );
                taken.zip(&left, |a, b| a + b).ok_or_else(|| misfit(&taken, &left))?
            }
        };
        values.push(value);
    }
    Ok(values)
}

/// The gradient of one step by another.
pub(super) fn gradient(steps: &[Step], values: &[Array], of: usize, by: usize) -> Array {
    let mut gradients: Vec<Option<Array>> = vec![None; steps.len()];
    gradients[of] = Some(Array::filled(values[of].size, 1.0));
    for at in (by + 1..=of).rev() {
        let Some(gradient) = gradients[at].take() else { continue };
        let mut add = |operand: &Operand, more: Array| {
            let Operand::Step(to) = operand else { return };
            let more = more.shrink(values[*to].size);
            match &mut gradients[*to] {
                Some(sum) => sum.add(&more),
                empty => *empty = Some(more),
            }
        };
        let get = |operand: &Operand| match operand {
            Operand::Step(at) => values[*at].clone(),
            Operand::Number(number) => Array::scalar(*number),
        };
        // Operands fitted on the way there, so they do on the way back.
        let zip = |a: &Array, b: &Array, function: &dyn Fn(f64, f64) -> f64| {
            a.zip(b, function).expect("the forward pass checked the sizes")
        };
        match &steps[at] {
            Step::Input(_) => {}
            Step::One(one, x) => {
                if let Some(more) = one.back(&values[*x], &values[at], &gradient) {
                    add(&Operand::Step(*x), more);
                }
            }
            Step::Two(two, a, b) => {
                let (x, y) = (get(a), get(b));
                let by_a = zip(&x, &y, &|x, y| two.slopes(x, y).0);
                let by_b = zip(&x, &y, &|x, y| two.slopes(x, y).1);
                add(a, zip(&gradient, &by_a, &|gradient, slope| gradient * slope));
                add(b, zip(&gradient, &by_b, &|gradient, slope| gradient * slope));
            }
            Step::Clamp(x, low, high) => {
                let inside = values[*x].map(|x| f64::from(clamped(x, *low, *high) == x));
                add(
                    &Operand::Step(*x),
                    zip(&gradient, &inside, &|gradient, inside| gradient * inside),
                );
            }
            Step::Where(condition, yes, no) => {
                let condition = &values[*condition];
                add(yes, zip(&gradient, condition, &|g, c| if c == 0.0 { 0.0 } else { g }));
                add(no, zip(&gradient, condition, &|g, c| if c == 0.0 { g } else { 0.0 }));
            }
        }
    }
    gradients[by].take().unwrap_or_else(|| Array::filled(values[by].size, 0.0))
}

fn clamped(x: f64, low: Option<f64>, high: Option<f64>) -> f64 {
    let x = low.map_or(x, |low| larger(x, low));
    high.map_or(x, |high| -larger(-x, -high))
}
