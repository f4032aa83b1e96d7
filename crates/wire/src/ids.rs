//! Ids of server objects, and sequence numbers.
//!
//! Servers choose ids, and clients treat them as opaque strings. The exceptions are
//! [`ModelId::in_session`] and [`SamplerId::in_session`], whose form the protocol defines.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(Arc<str>);

        impl $name {
            /// Returns the id as a string.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(id: &str) -> Self {
                Self(id.into())
            }
        }

        impl From<String> for $name {
            fn from(id: String) -> Self {
                Self(id.into())
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.as_str().to_owned()
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.as_str() == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.as_str() == *other
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}

id! {
    /// Id of a session.
    SessionId
}
id! {
    /// Id of a model. Also the id of its training run.
    ModelId
}
id! {
    /// Id of a sampling session.
    SamplerId
}
id! {
    /// Id of a submitted request and its future.
    RequestId
}
id! {
    /// Id of a sampled sequence.
    SequenceId
}
id! {
    /// Id of an uploaded custom loss.
    LossId
}

impl ModelId {
    /// Returns the id of model number `n` of a session.
    ///
    /// ```
    /// # use tinkex_wire as tinkex;
    /// # use tinkex::{ModelId, SessionId};
    /// assert_eq!(ModelId::in_session(&SessionId::from("s"), 2).as_str(), "s:train:2");
    /// ```
    #[must_use]
    pub fn in_session(session: &SessionId, n: u32) -> Self {
        format!("{session}:train:{n}").into()
    }
}

impl SamplerId {
    /// Returns the id of sampling session number `n` of a session.
    #[must_use]
    pub fn in_session(session: &SessionId, n: u32) -> Self {
        format!("{session}:sample:{n}").into()
    }
}

/// Sequence number of a request (`seq_id`).
///
/// The training requests of a model have the numbers 1, 2, 3, … of at most 31 bits. Each client of
/// a sampling session numbers its requests within a block of its own, which takes 64 bits: see
/// [`Seq::first_of_clone`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Seq(u64);

impl Seq {
    /// First operation on a model. The creation of the model has number 0.
    pub const FIRST: Self = Self(1);

    /// Size of a sampling client's block of sequence numbers.
    pub const CLONE_BLOCK: u64 = 1_000_000_000;

    /// Creates a sequence number.
    #[must_use]
    pub const fn new(n: u64) -> Self {
        Self(n)
    }

    /// Returns the first sequence number of a sampling client. The client that created the sampling
    /// session is clone 0.
    ///
    /// ```
    /// # use tinkex_wire::Seq;
    /// assert_eq!(Seq::first_of_clone(3).get(), 3_000_000_000);
    /// assert_eq!(Seq::new(3_000_000_017).clone_id(), 3);
    /// ```
    #[must_use]
    pub const fn first_of_clone(clone: u64) -> Self {
        Self(clone.saturating_mul(Self::CLONE_BLOCK))
    }

    /// Returns the number of the sampling client to whose block the sequence number belongs.
    #[must_use]
    pub const fn clone_id(self) -> u64 {
        self.0 / Self::CLONE_BLOCK
    }

    /// Returns the number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Seq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}
