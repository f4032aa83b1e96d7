//! Numbers of the types of tokens, the values of `tokenizer.ggml.token_type`.

/// Text is encoded to such a token.
pub(crate) const NORMAL: i32 = 1;
/// A special token such as `<|im_end|>`.
pub(crate) const CONTROL: i32 = 3;
/// An added token that is not special.
pub(crate) const USER_DEFINED: i32 = 4;
/// The embedding has a row for the token, but no text is encoded to it.
pub(crate) const UNUSED: i32 = 5;
