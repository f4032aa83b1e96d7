//! [`Conversation`]: messages exchanged with a model.

use tinkex::{
    Chat, Message, SampleStream, SampleStreamOptions, SamplingClient, SamplingParams, StopCondition,
};

use crate::error::CommandError;

/// Conversation with a model.
pub(super) struct Conversation {
    pub(super) sampler: SamplingClient,
    pub(super) chat: Chat,
    pub(super) system: Option<String>,
    pub(super) messages: Vec<Message>,
}

impl Conversation {
    /// Returns all messages, with the system message first.
    pub(super) fn all_messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(Message::system);
        system.chain(self.messages.iter().cloned()).collect()
    }

    /// Starts sampling a response to the last message, and returns the stream of its tokens.
    pub(super) fn complete(&self, params: SamplingParams) -> Result<SampleStream, CommandError> {
        let stop: StopCondition = match params.stop.clone() {
            Some(stop) => stop,
            None => self.chat.stop()?,
        };
        let prompt = self.chat.prompt(&self.all_messages())?;
        let options =
            SampleStreamOptions::new(params.stop(stop)).tokenizer(self.chat.tokenizer().clone());
        Ok(self.sampler.sample_stream(prompt, options))
    }
}
