//! Names of things on the server, and the numbers that order requests.
//!
//! Ids are opaque text that the server chose; two conventions that clients rely on
//! ([`ModelId::in_session`], [`SamplerId::in_session`]) are written down once, here.

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
            /// The id as it stands on the wire.
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
    /// A session: one program's stay on the server.
    SessionId
}
id! {
    /// A model being trained. The same text is the id of its training run.
    ModelId
}
id! {
    /// A sampling session: fixed weights to sample from.
    SamplerId
}
id! {
    /// One submitted request, to ask for its result.
    RequestId
}
id! {
    /// One sampled sequence, as provenance spans name it.
    SequenceId
}
id! {
    /// A custom loss uploaded to the server.
    LossId
}

impl ModelId {
    /// The id of the `n`th model of a session.
    ///
    /// ```
    /// # use tinkex_wire::{ModelId, SessionId};
    /// assert_eq!(ModelId::in_session(&SessionId::from("s"), 2).as_str(), "s:train:2");
    /// ```
    #[must_use]
    pub fn in_session(session: &SessionId, n: u32) -> Self {
        format!("{session}:train:{n}").into()
    }
}

impl SamplerId {
    /// The id of the `n`th sampling session of a session.
    #[must_use]
    pub fn in_session(session: &SessionId, n: u32) -> Self {
        format!("{session}:sample:{n}").into()
    }
}

/// The place of a request in its line.
///
/// Training requests of a model count 1, 2, 3, … and must fit 31 bits. Sampling requests count
/// from a block of their client and need 64 bits: see [`Seq::first_of_clone`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Seq(u64);

impl Seq {
    /// The first operation on a model; its creation is number 0.
    pub const FIRST: Self = Self(1);

    /// How many sampling requests one client may number before it runs into the next one's block.
    pub const CLONE_BLOCK: u64 = 1_000_000_000;

    /// A number as given.
    #[must_use]
    pub const fn new(n: u64) -> Self {
        Self(n)
    }

    /// The first sampling number of a client: clients of one sampling session are told apart by
    /// the block they count in. The creating client is clone 0.
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

    /// Which client a sampling number belongs to.
    #[must_use]
    pub const fn clone_id(self) -> u64 {
        self.0 / Self::CLONE_BLOCK
    }

    /// The number.
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
