//! [`Isa`]: the instruction-set extension that the kernels use.

use std::sync::OnceLock;

use super::{WeightFormat, kernel_check};

/// An instruction-set extension that this CPU supports.
///
/// The field is private to this module, and every constructor either queries the CPU or returns
/// the portable level. The kernels rely on this: holding an `Isa` proves that its instructions may
/// be executed. All levels produce the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Isa(Level);

/// Instruction-set level, for dispatch. Unlike [`Isa`] it proves nothing about the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    /// Only instructions that the compilation target always has.
    Portable,
    /// 256-bit registers with fused multiply-add and conversion of 16-bit floats.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// Instructions that every CPU of the compilation target has.
    pub(crate) const PORTABLE: Self = Self(Level::Portable);

    /// Returns the fastest level that this CPU supports and that passes [`kernel_check`].
    ///
    /// The check runs once per process.
    pub(crate) fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let passes = |isa: &Self| kernel_check::matches_portable(*isa);
            Self::available().into_iter().rev().find(passes).unwrap_or(Self::PORTABLE)
        })
    }

    /// Returns every level that this CPU supports, slowest first.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = vec![Self::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                all.push(Self(Level::Avx2));
                if is_x86_feature_detected!("avx512f") {
                    all.push(Self(Level::Avx512));
                }
            }
        }
        all
    }

    pub(super) fn level(self) -> Level {
        self.0
    }

    /// Returns the largest number of left-hand rows for which micro-kernels decode weights of this
    /// format in registers. For more rows the weights are decoded once into a buffer.
    pub(super) fn max_rows_decoded_in_registers(self, format: WeightFormat) -> usize {
        match (self.0, format) {
            (_, WeightFormat::F32) => usize::MAX,
            (Level::Portable, WeightFormat::F16 | WeightFormat::Bf16) => 12,
            (Level::Portable, _) => 0,
            // The conversion of bf16 uses execution units that the multiplications leave idle.
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2 | Level::Avx512, WeightFormat::Bf16) => usize::MAX,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2 | Level::Avx512, WeightFormat::F16) => 12,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx2, _) => 4,
            #[cfg(target_arch = "x86_64")]
            (Level::Avx512, _) => 12,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_detected_level_is_available_and_portable_always_is() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::PORTABLE);
        assert!(available.contains(&Isa::detect()));
    }
}
