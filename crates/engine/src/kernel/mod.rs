//! The arithmetic that everything else is made of, and the only room with SIMD in it.
//!
//! One rule holds for all of it: **an output element is one chain of fused multiply-adds over the
//! reduction index, in rising order.** Tiles, threads, the width of the registers and what else is
//! in the batch decide who computes an element and when, never in which order. That is why the same
//! row gives the same bits alone and among a thousand, in prefill and in decode, on one thread and
//! on many, with AVX-512, with AVX2 and without either.
//!
//! [`Kernel`] is the seam: the model calls it and nothing below it, so another device can take its
//! place without the model noticing.

use std::sync::OnceLock;

mod exp;
mod gemm;
mod kernel_check;
pub(crate) mod paged_attention;
mod panels;
pub(crate) mod row_ops;
mod simd;
mod sync;
mod task_pool;
mod thread_pool;
#[cfg(test)]
mod thread_pool_tests;
mod tile;

pub(crate) use gemm::{FusedGemm, Lhs, Rhs};
pub(crate) use panels::Panels;
pub use panels::Precision;
pub(crate) use task_pool::TaskPool;

/// How many outputs one panel of packed weights holds: one AVX-512 register, two of AVX2.
pub(crate) const PANEL: usize = 16;

/// Which instructions are used. All give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Isa {
    /// No instruction beyond what the target always has.
    Portable,
    /// 256-bit registers with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit registers.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Isa {
    /// The best that this machine has and that gives the right bits, tried once.
    pub(crate) fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let right = |isa: &Self| kernel_check::matches_portable(*isa);
            Self::available().into_iter().rev().find(right).unwrap_or(Self::Portable)
        })
    }

    /// Up to so many rows bf16 weights are widened in registers, by every tile; above it once for all
    /// rows. AVX2 does it beside its multiplications, AVX-512 instead of them.
    fn widened_in_registers(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => usize::MAX,
            _ => 12,
        }
    }

    /// All that this machine has, worst first.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                all.push(Self::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    all.push(Self::Avx512);
                }
            }
        }
        all
    }
}

/// Instructions and threads: whatever computes goes through one of these.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    isa: Isa,
    pool: TaskPool,
}

impl Kernel {
    /// The best instructions on `threads` threads; 0 means one for each core.
    pub(crate) fn new(threads: usize) -> crate::Result<Self> {
        Ok(Self { isa: Isa::detect(), pool: TaskPool::new(threads)? })
    }

    /// No special instructions, on the caller's thread: for what is small.
    pub(crate) fn plain() -> Self {
        Self { isa: Isa::Portable, pool: TaskPool::alone() }
    }

    /// The same with instructions of one's choice, which the machine must have.
    #[cfg(test)]
    pub(crate) fn with_isa(isa: Isa, threads: usize) -> Self {
        assert!(Isa::available().contains(&isa), "{isa:?} is not there");
        Self { isa, pool: TaskPool::new(threads).expect("threads can be started") }
    }

    /// The same instructions on the caller's thread alone, for use inside a task.
    pub(crate) fn alone(&self) -> Self {
        Self { isa: self.isa, pool: TaskPool::alone() }
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn pool(&self) -> &TaskPool {
        &self.pool
    }
}
