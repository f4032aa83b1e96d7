//! Integration tests of the loss interpreter.

mod graphs;
mod hostile;
mod json;
mod kinks;
