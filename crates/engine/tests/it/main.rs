//! The engine, from outside.
