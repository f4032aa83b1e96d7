//! [`ServerLimits`]: limits on memory, connections and requests.

use tinkex_store::log;

use crate::memory::process_memory;
use crate::memory_size::MemorySize;

/// Limits on memory and concurrency.
///
/// A client that exceeds a queue limit receives 429 with the time after which to retry; a body over
/// its limit is rejected with 413. Caches over their limit evict the least recently used entries.
///
/// [`default`](Self::default) returns the same limits on every machine;
/// [`for_this_process`](Self::for_this_process) derives them from the memory that the process may
/// use.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerLimits {
    /// Maximum number of open connections (default 4096). Further connections wait to be accepted.
    pub connections: usize,
    /// Maximum number of open connections without an authorized request (default 3,072; at most
    /// three quarters of [`connections`](Self::connections)). A further connection closes the oldest
    /// of them.
    pub unauthenticated_connections: usize,
    /// Maximum number of open connections of one address without an authorized request (default
    /// 256). Does not apply to loopback addresses.
    pub unauthenticated_connections_per_address: usize,
    /// Maximum size of a request body that carries training or sampling data, in bytes, after
    /// decompression (default 64 MiB, less if the process may use less than 2 GiB).
    pub body_bytes: usize,
    /// Maximum size of any other request body, in bytes (default 1 MiB).
    pub small_body_bytes: usize,
    /// Maximum size of an imported adapter, in bytes (default 4 GiB).
    pub import_bytes: u64,
    /// Maximum total size of the request bodies being read, in bytes (default 1/32 of the
    /// memory of the process, at most 1 GiB).
    pub total_body_bytes: usize,
    /// Maximum memory of the texts being tokenized, in bytes (default 1/32 of the memory of the
    /// process, at most 1 GiB). Further texts wait; a text that needs more by itself is refused. A
    /// tokenizer needs up to 384 bytes per byte of text.
    pub text_bytes: usize,
    /// Maximum number of requests that are queued or being sampled (default 50,000).
    pub queued_requests: usize,
    /// Maximum total size of the queued requests and running samples, in bytes (default 1/32
    /// of the memory of the process, at most 1 GiB).
    pub queued_bytes: usize,
    /// Maximum total size of the results held in memory, in bytes (default 1/64 of the memory
    /// of the process, at most 1 GiB). Beyond it, the oldest results are dropped from memory and
    /// read from disk when a client polls them.
    pub result_bytes: usize,
    /// Maximum total size of the results that are being read from disk or sent, in bytes (default
    /// 1/64 of the memory of the process, at most 1 GiB). Further polls wait.
    pub response_bytes: usize,
    /// Maximum size of the records of one user, in bytes (default 1/32 of the memory of the process,
    /// at least 32 MiB and at most 1 GiB): 1 KiB and the texts of each session, run, checkpoint,
    /// sampling session and request, 16 times the size of custom losses, 256 bytes of each usage
    /// counter, and the metadata, which is on disk only. Beyond it, requests that create records
    /// receive 429.
    pub record_bytes: u64,
    /// Minimum size of the payload file, in bytes, for compaction (default 32 MiB). A larger file
    /// is compacted once at least half of it is no longer needed.
    pub payload_bytes: u64,
    /// Maximum memory of the models in training, in bytes (default 1/8 of the memory of the
    /// process). The least recently used models are written to disk and reloaded on demand.
    pub model_bytes: usize,
    /// Maximum memory of the adapters loaded for sampling, in bytes (default 1/16 of the memory of
    /// the process). The least recently used adapters are evicted and reloaded from disk on demand.
    pub sampler_weight_bytes: usize,
    /// Maximum memory of the activations of a training pass, in bytes (default 1/4 of the memory
    /// of the process). A larger batch is split.
    pub training_bytes: usize,
    /// Maximum memory of the KV cache of one base model, in bytes (default 1/8 of the memory of the
    /// process).
    pub kv_cache_bytes: usize,
}

impl Default for ServerLimits {
    /// Returns the limits for 16 GiB of memory, independent of the memory of this machine.
    fn default() -> Self {
        Self::for_memory(16 << 30)
    }
}

impl ServerLimits {
    /// Returns the limits for a process that may use `memory` bytes. About a third is left for the
    /// weights of base models.
    ///
    /// Limits change the size of batches and the number of evictions, but never the results: a
    /// batch that is split gives the same bits.
    #[must_use]
    pub fn for_memory(memory: u64) -> Self {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        let fraction = |of: usize, min: usize, max: usize| (memory / of).clamp(min, max);
        let total_body_bytes = fraction(32, 32 << 20, 1 << 30);
        Self {
            connections: 4_096,
            unauthenticated_connections: 3_072,
            unauthenticated_connections_per_address: 256,
            body_bytes: total_body_bytes.min(64 << 20),
            small_body_bytes: 1 << 20,
            import_bytes: 4 << 30,
            total_body_bytes,
            text_bytes: fraction(32, 64 << 20, 1 << 30),
            queued_requests: 50_000,
            queued_bytes: fraction(32, 32 << 20, 1 << 30),
            result_bytes: fraction(64, 8 << 20, 1 << 30),
            response_bytes: fraction(64, 8 << 20, 1 << 30),
            record_bytes: fraction(32, 32 << 20, 1 << 30) as u64,
            payload_bytes: 32 << 20,
            model_bytes: fraction(8, 64 << 20, usize::MAX),
            sampler_weight_bytes: fraction(16, 32 << 20, usize::MAX),
            training_bytes: fraction(4, 128 << 20, usize::MAX),
            kv_cache_bytes: fraction(8, 64 << 20, usize::MAX),
        }
    }

    /// Returns the limits for the memory that this process may use
    /// ([`process_memory`](crate::process_memory)), or the defaults if it is not known.
    #[must_use]
    pub fn for_this_process() -> Self {
        process_memory().map_or_else(Self::default, Self::for_memory)
    }

    /// Returns the limits on memory with their names, for metrics and the log.
    pub(crate) fn memory_limits(&self) -> [(&'static str, usize); 9] {
        [
            ("training", self.training_bytes),
            ("models", self.model_bytes),
            ("kv_cache", self.kv_cache_bytes),
            ("sampler_weights", self.sampler_weight_bytes),
            ("bodies", self.total_body_bytes),
            ("texts", self.text_bytes),
            ("queue", self.queued_bytes),
            ("results", self.result_bytes),
            ("responses", self.response_bytes),
        ]
    }

    /// Logs the limits on memory.
    pub(crate) fn log(&self) {
        let limits = self.memory_limits().map(|(name, bytes)| (name, MemorySize::new(bytes)));
        let limits = limits.map(|(name, size)| format!("{name} {size}"));
        let memory = process_memory().and_then(|bytes| usize::try_from(bytes).ok());
        tracing::info!(
            target: log::MODEL,
            process_memory = memory.map(|bytes| MemorySize::new(bytes).to_string()),
            limits = limits.join(", "),
            "memory limits"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_leave_memory_for_base_models() {
        for memory in [2_u64 << 30, 16 << 30, 512 << 30] {
            let limits = ServerLimits::for_memory(memory);
            let total: usize = limits.memory_limits().iter().map(|(_, bytes)| bytes).sum();
            let share = total as f64 / memory as f64;
            assert!((0.5..0.7).contains(&share), "{share} of {memory}");
        }
    }

    #[test]
    fn a_small_machine_still_accepts_requests() {
        for memory in [0, 64 << 20, 512 << 20] {
            let limits = ServerLimits::for_memory(memory);
            assert!(limits.body_bytes >= 16 << 20 && limits.body_bytes <= limits.total_body_bytes);
            assert!(limits.training_bytes >= 128 << 20 && limits.kv_cache_bytes >= 64 << 20);
        }
        let large = ServerLimits::for_memory(u64::MAX);
        assert_eq!((large.body_bytes, large.total_body_bytes), (64 << 20, 1 << 30));
    }
}
