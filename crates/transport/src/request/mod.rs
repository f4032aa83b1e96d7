//! One request: `encode` builds the URL, body and headers, `attempt` authenticates and sends the
//! request once, [`redirect`] follows redirects, and `receive` receives the body of the response,
//! whole or as a stream. [`header`] has the default headers; [`sent_flag`] records whether the
//! server may have read the request.

mod attempt;
pub(crate) mod encode;
pub mod header;
pub(crate) mod receive;
pub mod redirect;
pub mod sent_flag;
