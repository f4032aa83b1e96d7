//! What people read, as files to look at.
