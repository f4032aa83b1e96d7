//! Resumable downloads: [`resume`] requests the missing part of a file until it is complete, and
//! [`attempts`] limits the retries.

pub mod attempts;
pub mod resume;
