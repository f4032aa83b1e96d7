//! Compute kernels: matrix products, attention, and row-wise operations.
//!
//! **Reduction order.** Every output element of a matrix product is one chain of fused
//! multiply-adds over the reduction index, in ascending order. Sums over a row run in sixteen lanes
//! that are added in one fixed order. Tiling, the number of threads, the register width and the
//! other rows of the batch determine which thread computes an element and when, never in which
//! order its terms are added. A row therefore has the same bits alone and in a batch of a thousand,
//! in prefill and in decode, on one thread and on many, with AVX-512, with AVX2 and without either.
//!
//! [`Kernel`] is the only entry point for the model, so that another device can be added behind it.
//! All `unsafe` code of the crate is in this module.
//!
//! | Files | Content |
//! |---|---|
//! | `gemm`, `tile` | Matrix products, and the micro-kernel that computes a tile of them |
//! | `paged_attention` | Attention over pages of the KV cache |
//! | `row_ops`, `exp` | Norms, softmax, SwiGLU and other operations on rows |
//! | `panels`, `panel_packing`, `panel_format`, `weight_format` | Packed weights, how they are packed, and how a panel of each format is read |
//! | `simd`, `isa`, `kernel_check` | Vectors of sixteen lanes, the choice of the instruction set, and its check at start-up |
//! | `task_pool`, `thread_pool`, `sync` | Parallel tasks, the threads that run them, and the primitives that `loom` replaces |
//! | `activation_buffer`, `panel_memory`, `system_memory` | Reused memory of activations, memory of weights, and the system calls behind both |

mod activation_buffer;
mod exp;
mod gemm;
mod isa;
mod kernel_check;
pub(crate) mod paged_attention;
mod panel_format;
mod panel_memory;
mod panel_packing;
mod panels;
pub(crate) mod row_ops;
mod simd;
mod sync;
mod system_memory;
mod task_pool;
mod thread_pool;
#[cfg(test)]
mod thread_pool_tests;
mod tile;
mod weight_format;

pub(crate) use activation_buffer::{ActivationBuffer, free_unused as free_unused_activations};
pub(crate) use gemm::{FusedGemm, Lhs, Rhs};
pub(crate) use isa::Isa;
pub use panels::Precision;
pub(crate) use panels::{MatrixSource, Panels, ReadRows};
pub(crate) use task_pool::TaskPool;
pub(crate) use weight_format::WeightFormat;

use self::panel_memory::Arena;

/// Output columns per panel of packed weights: one AVX-512 register of f32, or two of AVX2.
pub(crate) const PANEL: usize = 16;

/// Minimum size in bytes of matrices for which huge pages are worth their granularity.
const MIN_ARENA: usize = 8 << 20;

/// The instruction set and the threads that run all computation. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Kernel {
    isa: Isa,
    pool: TaskPool,
    /// Memory for the weights that are packed with this kernel; `None` for the heap.
    arena: Option<Arena>,
}

impl Kernel {
    /// Creates a kernel with the fastest instruction set and `threads` threads, including the
    /// caller's; 0 means one per core.
    pub(crate) fn new(threads: usize) -> crate::Result<Self> {
        let isa = Isa::detect();
        let pool = TaskPool::new(threads)?;
        Ok(Self { isa, pool, arena: Some(Arena::default()) })
    }

    /// Creates a kernel with portable instructions on the caller's thread, for small inputs.
    pub(crate) fn portable() -> Self {
        Self { isa: Isa::PORTABLE, pool: TaskPool::single_threaded(), arena: None }
    }

    /// Creates a portable kernel to pack matrices of `bytes` bytes in total, which live and are read
    /// together.
    pub(crate) fn for_packing(bytes: usize) -> Self {
        let arena = (bytes >= MIN_ARENA).then(Arena::default);
        Self { arena, ..Self::portable() }
    }

    /// Creates a kernel with the given instruction set and number of threads.
    #[cfg(test)]
    pub(crate) fn with_isa(isa: Isa, threads: usize) -> Self {
        let pool = TaskPool::new(threads).expect("the system can start threads");
        Self { isa, pool, arena: None }
    }

    /// Returns a kernel with the same instruction set that runs on the caller's thread only, for
    /// use inside a parallel task.
    pub(crate) fn single_threaded(&self) -> Self {
        Self { pool: TaskPool::single_threaded(), ..self.clone() }
    }

    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn pool(&self) -> &TaskPool {
        &self.pool
    }

    fn arena(&self) -> Option<&Arena> {
        self.arena.as_ref()
    }
}
