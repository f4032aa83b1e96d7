//! Element-wise and reducing operations on rows of f32: norms, activations, softmax, conversions.
//!
//! Each operation is written once, without branches, and compiled for every instruction set. Sums
//! accumulate in sixteen lanes that are added in a fixed order, whatever the register width.
//! The slices of one call should have equal lengths; elements beyond the shortest are ignored.

#![expect(unsafe_code, reason = "calls functions that require a detected instruction set")]

use tinkex_weights::BlockFormat;

use super::PANEL;
use super::exp::exp;
use super::isa::{Isa, Level};

/// Defines functions that take the [`Isa`] as first argument and are compiled for each level.
macro_rules! for_each_isa {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block)*) => {
        $(
            $(#[$doc])*
            pub(crate) fn $name(isa: Isa, $($arg: $type),*) $(-> $out)? {
                #[inline(always)]
                fn body($($arg: $type),*) $(-> $out)? $body

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    body($($arg),*)
                }

                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx2,fma,f16c")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    body($($arg),*)
                }

                match isa.level() {
                    Level::Portable => body($($arg),*),
                    // SAFETY: an `Isa` of this level proves that the CPU has AVX2, FMA and F16C.
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 => unsafe { avx2($($arg),*) },
                    // SAFETY: an `Isa` of this level proves that the CPU has AVX-512F, AVX2, FMA
                    // and F16C.
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 => unsafe { avx512($($arg),*) },
                }
            }
        )*
    };
}

pub(super) use for_each_isa;

for_each_isa! {
    /// Converts groups of sixteen f32 values, one group for each input, to bf16. The result has
    /// sixteen little-endian words for every two inputs, with the first input in the lower halves.
    /// Rounds to nearest, ties to even.
    fn narrow_pairs(from: &[f32], to: &mut [u8]) {
        let from = from.as_chunks::<PANEL>().0.as_chunks::<2>().0;
        let to = to.as_chunks_mut::<{ PANEL * 4 }>().0;
        for (to, [first, second]) in to.iter_mut().zip(from) {
            let to = to.as_chunks_mut::<4>().0;
            for lane in 0..PANEL {
                let word = bf16_bits(first[lane]) | (bf16_bits(second[lane]) << 16);
                to[lane] = word.to_le_bytes();
            }
        }
    }

    /// Transposes up to sixteen rows of sixteen: `to[k][col] = from[col][k]`. `to` may have fewer
    /// than sixteen rows; columns for which `from` has no row are set to 0.
    fn transpose(from: &[f32], to: &mut [f32]) {
        if let (Ok(from), Ok(to)) =
            (<&[f32; PANEL * PANEL]>::try_from(from), <&mut [f32; PANEL * PANEL]>::try_from(&mut *to))
        {
            for k in 0..PANEL {
                for col in 0..PANEL {
                    to[k * PANEL + col] = from[col * PANEL + k];
                }
            }
            return;
        }
        to.fill(0.0);
        for (col, from) in from.chunks_exact(PANEL).enumerate() {
            for (to, from) in to.chunks_exact_mut(PANEL).zip(from) {
                to[col] = *from;
            }
        }
    }

    /// Encodes weights in a block format of GGUF; see [`BlockFormat::encode`].
    fn encode(format: BlockFormat, from: &[f32], to: &mut [u8]) {
        format.encode(from, to);
    }

    /// Returns the dot product `Σ aᵢ bᵢ`.
    fn dot(a: &[f32], b: &[f32]) -> f32 {
        dot_lanes(a, b)
    }

    /// Computes `to += from`.
    fn add(to: &mut [f32], from: &[f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += *from;
        }
    }

    /// Computes `to *= scale`.
    fn scale(to: &mut [f32], scale: f32) {
        for to in to.iter_mut() {
            *to *= scale;
        }
    }

    /// Computes the RMS norm of a row, `out = x · gain / rms(x)` with
    /// `rms(x) = √(mean(x²) + epsilon)`, and returns `1 / rms(x)`.
    fn norm(x: &[f32], gain: &[f32], epsilon: f32, out: &mut [f32]) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "rows are shorter than 2²⁴")]
        let mean = dot_lanes(x, x) / x.len() as f32;
        let inverse = 1.0 / (mean + epsilon).sqrt();
        for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
            *out = (*x * inverse) * *gain;
        }
        inverse
    }

    /// Like [`norm`], in place.
    fn norm_in_place(x: &mut [f32], gain: &[f32], epsilon: f32) -> f32 {
        #[expect(clippy::cast_precision_loss, reason = "rows are shorter than 2²⁴")]
        let mean = dot_lanes(x, x) / x.len() as f32;
        let inverse = 1.0 / (mean + epsilon).sqrt();
        for (x, gain) in x.iter_mut().zip(gain) {
            *x = (*x * inverse) * *gain;
        }
        inverse
    }

    /// Backward pass of [`norm`]: adds the gradient with respect to `x` to `grad_x`.
    fn norm_backward(x: &[f32], gain: &[f32], inverse: f32, grad: &[f32], grad_x: &mut [f32]) {
        let mut lanes = [0.0_f32; PANEL];
        let (xs, rest_x) = x.as_chunks::<PANEL>();
        let (grads, rest_grad) = grad.as_chunks::<PANEL>();
        let (gains, rest_gain) = gain.as_chunks::<PANEL>();
        for ((x, grad), gain) in xs.iter().zip(grads).zip(gains) {
            for l in 0..PANEL {
                lanes[l] = (grad[l] * gain[l]).mul_add(x[l], lanes[l]);
            }
        }
        for (l, ((x, grad), gain)) in rest_x.iter().zip(rest_grad).zip(rest_gain).enumerate() {
            lanes[l] = (grad * gain).mul_add(*x, lanes[l]);
        }
        #[expect(clippy::cast_precision_loss, reason = "rows are shorter than 2²⁴")]
        let shift = sum_lanes(lanes) * inverse * inverse / x.len() as f32;
        for (((out, x), grad), gain) in grad_x.iter_mut().zip(x).zip(grad).zip(gain) {
            *out += inverse * (-shift).mul_add(*x, grad * gain);
        }
    }

    /// Computes SwiGLU, `out = silu(gate) · up`.
    fn swiglu(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    }

    /// Backward pass of [`swiglu`]: replaces `gate` and `up` by the gradients with respect to them.
    fn swiglu_backward(gate: &mut [f32], up: &mut [f32], grad: &[f32]) {
        for ((gate, up), grad) in gate.iter_mut().zip(up).zip(grad) {
            let sigmoid = 1.0 / (1.0 + exp(-*gate));
            let silu = *gate * sigmoid;
            let slope = (*gate * (1.0 - sigmoid)).mul_add(sigmoid, sigmoid);
            *gate = grad * *up * slope;
            *up = grad * silu;
        }
    }

    /// Returns the maximum, or NaN if any element is NaN.
    fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; PANEL];
        let mut nan = [0_u32; PANEL];
        let (chunks, rest) = x.as_chunks::<PANEL>();
        for x in chunks {
            for l in 0..PANEL {
                lanes[l] = if x[l] > lanes[l] { x[l] } else { lanes[l] };
                nan[l] |= u32::from(x[l].is_nan());
            }
        }
        for (l, x) in rest.iter().enumerate() {
            lanes[l] = if *x > lanes[l] { *x } else { lanes[l] };
            nan[l] |= u32::from(x.is_nan());
        }
        if nan.iter().any(|nan| *nan != 0) {
            return f32::NAN;
        }
        lanes.iter().fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a })
    }

    /// Computes `x = exp(x - shift)` and returns the sum of the results.
    fn exp_and_sum(x: &mut [f32], shift: f32) -> f32 {
        let mut lanes = [0.0_f32; PANEL];
        let (chunks, rest) = x.as_chunks_mut::<PANEL>();
        for x in chunks {
            for l in 0..PANEL {
                x[l] = exp(x[l] - shift);
                lanes[l] += x[l];
            }
        }
        for (l, x) in rest.iter_mut().enumerate() {
            *x = exp(*x - shift);
            lanes[l] += *x;
        }
        sum_lanes(lanes)
    }

    /// Returns `Σ exp(x - shift)` with the same bits as [`exp_and_sum`].
    fn sum_exp(x: &[f32], shift: f32) -> f32 {
        let mut lanes = [0.0_f32; PANEL];
        let (chunks, rest) = x.as_chunks::<PANEL>();
        for x in chunks {
            for l in 0..PANEL {
                lanes[l] += exp(x[l] - shift);
            }
        }
        for (l, x) in rest.iter().enumerate() {
            lanes[l] += exp(*x - shift);
        }
        sum_lanes(lanes)
    }

    /// Computes `x = scale · exp(x - shift)`.
    fn scaled_exp(x: &mut [f32], shift: f32, scale: f32) {
        for x in x.iter_mut() {
            *x = scale * exp(*x - shift);
        }
    }

    /// Backward pass of a softmax row with the probabilities `p`: computes
    /// `grad = p · (grad - shift) · scale`, where `shift` is `Σ pᵢ gradᵢ`.
    fn softmax_backward(p: &[f32], grad: &mut [f32], shift: f32, scale: f32) {
        for (grad, p) in grad.iter_mut().zip(p) {
            *grad = p * (*grad - shift) * scale;
        }
    }

    /// Rotates the pairs `(i, i + half)` of a head by their angles. `direction` is 1 for the
    /// forward and -1 for the inverse rotation.
    fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32], direction: f32) {
        let (first, second) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            let sin = sin * direction;
            let x = *a;
            let y = *b;
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

/// Returns the bits of the nearest bf16, ties to even.
#[inline(always)]
fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() { (bits >> 16) | 0x40 } else { rounded }
}

/// Returns `Σ aᵢ bᵢ`, accumulated in sixteen lanes.
#[inline(always)]
fn dot_lanes(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; PANEL];
    let (chunks_a, rest_a) = a.as_chunks::<PANEL>();
    let (chunks_b, rest_b) = b.as_chunks::<PANEL>();
    for (a, b) in chunks_a.iter().zip(chunks_b) {
        for l in 0..PANEL {
            lanes[l] = a[l].mul_add(b[l], lanes[l]);
        }
    }
    for (l, (a, b)) in rest_a.iter().zip(rest_b).enumerate() {
        lanes[l] = a.mul_add(*b, lanes[l]);
    }
    sum_lanes(lanes)
}

/// Returns the sum of the lanes in a fixed order: adds the upper half to the lower half, until one
/// lane remains.
#[inline(always)]
fn sum_lanes(mut lanes: [f32; PANEL]) -> f32 {
    let mut half = PANEL / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, seed: u64) -> Vec<f32> {
        let mut rng = crate::rng::ChaCha8::new(seed, 0);
        (0..len).map(|_| 4.0 * rng.uniform() - 2.0).collect()
    }

    /// Lengths below, at and above multiples of the vector width.
    const LENGTHS: [usize; 8] = [1, 2, 15, 16, 17, 31, 100, 259];

    #[test]
    fn every_level_gives_the_bits_of_the_portable_code() {
        for isa in Isa::available() {
            for len in LENGTHS {
                let x = noise(len, 1);
                let y = noise(len, 2);
                let z = noise(len, 3);
                let run = |isa: Isa| {
                    let mut all = vec![dot(isa, &x, &y), max(isa, &x), sum_exp(isa, &x, 0.5)];
                    let mut out = vec![0.0; len];
                    all.push(norm(isa, &x, &y, 1e-6, &mut out));
                    all.extend_from_slice(&out);
                    norm_in_place(isa, &mut out, &z, 1e-5);
                    all.extend_from_slice(&out);
                    norm_backward(isa, &x, &y, 0.7, &z, &mut out);
                    all.extend_from_slice(&out);
                    swiglu(isa, &x, &y, &mut out);
                    all.extend_from_slice(&out);
                    let mut gate = x.clone();
                    let mut up = y.clone();
                    swiglu_backward(isa, &mut gate, &mut up, &z);
                    all.extend(gate.into_iter().chain(up));
                    softmax_backward(isa, &x, &mut out, 0.3, 0.5);
                    all.extend_from_slice(&out);
                    all.push(exp_and_sum(isa, &mut out, 0.1));
                    all.extend_from_slice(&out);
                    scaled_exp(isa, &mut out, 0.2, -3.0);
                    scale(isa, &mut out, 0.9);
                    add(isa, &mut out, &z);
                    all.extend_from_slice(&out);
                    let mut head = noise(2 * len, 4);
                    rotate(isa, &mut head, &x, &y, -1.0);
                    all.extend(head);
                    all.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
                };
                assert_eq!(run(isa), run(Isa::PORTABLE), "{isa:?} {len}");
            }
        }
    }

    fn to_f64(x: &[f32]) -> Vec<f64> {
        x.iter().map(|x| f64::from(*x)).collect()
    }

    /// Compares a gradient with the central differences of `f`, computed in f64.
    fn check(x: &[f32], grad: &[f32], f: impl Fn(&[f64]) -> f64) {
        for i in 0..x.len() {
            let at = |shift: f64| {
                let mut x = to_f64(x);
                x[i] += shift;
                f(&x)
            };
            let expected = (at(1e-5) - at(-1e-5)) / 2e-5;
            let error = (expected - f64::from(grad[i])).abs();
            assert!(error < 1e-5 * (1.0 + expected.abs()), "{i}: {expected} {}", grad[i]);
        }
    }

    #[test]
    fn narrowing_rounds_like_the_half_crate() {
        let mut all = noise(4096, 9);
        all.extend([0.0, -0.0, 1.0 + f32::EPSILON, 1.003_906_3, 1.011_718_8, f32::MAX, 1e-40]);
        all.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0xff80_0001)]);
        all.resize(all.len().next_multiple_of(2 * PANEL), 3.3);
        let rounded = |x: &f32| half::bf16::from_f32(*x).to_le_bytes();
        let mut want = Vec::new();
        for pair in all.chunks_exact(2 * PANEL) {
            let (first, second) = pair.split_at(PANEL);
            for (first, second) in first.iter().zip(second) {
                want.extend([rounded(first), rounded(second)].concat());
            }
        }
        for isa in Isa::available() {
            let mut narrowed = vec![0; all.len() * 2];
            narrow_pairs(isa, &all, &mut narrowed);
            assert_eq!(narrowed, want, "{isa:?}");
        }
    }

    #[test]
    fn encoding_has_the_same_bits_on_every_instruction_set() {
        let values = noise(4096, 11);
        for format in BlockFormat::ALL {
            let mut want = vec![0; format.byte_len(values.len()).unwrap()];
            format.encode(&values, &mut want);
            for isa in Isa::available() {
                let mut encoded = vec![0; want.len()];
                encode(isa, format, &values, &mut encoded);
                assert!(encoded == want, "{} {isa:?}", format.name());
            }
        }
    }

    #[test]
    fn norm_backward_matches_finite_differences() {
        for len in LENGTHS {
            let x = noise(len, 1);
            let gain = noise(len, 2);
            let grad = noise(len, 3);
            let mut out = vec![0.0; len];
            let mut grad_x = vec![0.0; len];
            let inverse = norm(Isa::detect(), &x, &gain, 1e-3, &mut out);
            norm_backward(Isa::detect(), &x, &gain, inverse, &grad, &mut grad_x);
            let gain = to_f64(&gain);
            let grad = to_f64(&grad);
            check(&x, &grad_x, |x| {
                let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
                let inverse = 1.0 / (mean + 1e-3).sqrt();
                x.iter()
                    .zip(&gain)
                    .zip(&grad)
                    .map(|((x, gain), grad)| x * inverse * gain * grad)
                    .sum()
            });
        }
    }

    #[test]
    fn swiglu_backward_matches_finite_differences() {
        let gate = noise(67, 1);
        let up = noise(67, 2);
        let grad = noise(67, 3);
        let mut grad_gate = gate.clone();
        let mut grad_up = up.clone();
        swiglu_backward(Isa::detect(), &mut grad_gate, &mut grad_up, &grad);
        let loss = |gate: &[f64], up: &[f64]| -> f64 {
            let terms = gate.iter().zip(up).zip(&grad);
            terms
                .map(|((gate, up), grad)| gate / (1.0 + (-gate).exp()) * up * f64::from(*grad))
                .sum()
        };
        check(&gate, &grad_gate, |gate| loss(gate, &to_f64(&up)));
        check(&up, &grad_up, |up| loss(&to_f64(&gate), up));
    }

    #[test]
    fn softmax_backward_matches_finite_differences() {
        let x = noise(41, 1);
        let grad = noise(41, 2);
        let isa = Isa::detect();
        let mut p = x.clone();
        let sum = exp_and_sum(isa, &mut p, max(isa, &x));
        scale(isa, &mut p, 1.0 / sum);
        let mut grad_x = grad.clone();
        let shift = dot(isa, &p, &grad);
        softmax_backward(isa, &p, &mut grad_x, shift, 1.0);
        check(&x, &grad_x, |x| {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().zip(&grad).map(|(x, grad)| x.exp() / sum * f64::from(*grad)).sum()
        });
    }
}
