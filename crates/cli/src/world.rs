//! [`World`]: everything a command line touches outside itself.

use std::fmt;
use std::io::Write;

use tinkex::{Env, ServiceClientBuilder};

/// Everything a command line touches outside itself.
///
/// The program brings its own streams and environment; a test brings others, and looks at what was
/// written afterwards.
pub struct World {
    /// The environment. It is read nowhere else.
    pub env: Env,
    /// Where results go.
    pub out: Box<dyn Write>,
    /// Where questions, notices and errors go.
    pub err: Box<dyn Write>,
    /// How wide the terminal is that results go to; `None` if they go elsewhere.
    pub width: Option<usize>,
    /// Changes every client before it is built: a test puts its own server in here.
    pub prepare: Box<dyn Fn(ServiceClientBuilder) -> ServiceClientBuilder>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("env", &self.env)
            .field("width", &self.width)
            .finish_non_exhaustive()
    }
}
