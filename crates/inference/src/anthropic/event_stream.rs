//! [`MessageEvents`]: the sequence of events of a streamed message.

use tinkex_text::AnswerEvent;

use super::documents::{BlockDelta, ContentBlock, MessageDocument, StopDocument, StreamEvent};
use crate::EventWriter;
use crate::chat::{AnswerUpdate, AnswerUsage};

/// Writes the events of one message.
#[derive(Debug)]
pub(super) struct MessageEvents {
    id: String,
    model: String,
    /// Whether the message contains the reasoning of the model.
    thinking: bool,
    has_started: bool,
    /// Kind of the block that has no end yet.
    open: Option<BlockKind>,
    /// Number of blocks that have ended.
    blocks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    ToolUse,
}

impl MessageEvents {
    pub(super) fn new(id: String, model: String, thinking: bool) -> Self {
        Self { id, model, thinking, has_started: false, open: None, blocks: 0 }
    }

    /// Returns a document of the message without content.
    pub(super) fn document(&self, usage: AnswerUsage) -> MessageDocument<'_> {
        MessageDocument {
            id: &self.id,
            kind: "message",
            role: "assistant",
            model: &self.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage.into(),
        }
    }

    pub(super) fn shows_thinking(&self) -> bool {
        self.thinking
    }

    /// Writes the events of an update.
    pub(super) fn write(
        &mut self,
        update: AnswerUpdate,
        usage: AnswerUsage,
        out: &mut EventWriter,
    ) {
        if !self.has_started {
            self.has_started = true;
            send(out, &StreamEvent::MessageStart { message: self.document(usage) });
        }
        for part in update.parts {
            match part {
                AnswerEvent::Reasoning(_) if !self.thinking => {}
                AnswerEvent::Reasoning(thinking) => {
                    self.open(BlockKind::Thinking, out, || ContentBlock::Thinking {
                        thinking: String::new(),
                        signature: "",
                    });
                    self.delta(BlockDelta::Thinking { thinking }, out);
                }
                AnswerEvent::Content(text) => {
                    let empty = || ContentBlock::Text { text: String::new() };
                    self.open(BlockKind::Text, out, empty);
                    self.delta(BlockDelta::Text { text }, out);
                }
                AnswerEvent::ToolCallStart { name, .. } => {
                    self.close(out);
                    self.open(BlockKind::ToolUse, out, || ContentBlock::tool_use(name, "{}"));
                }
                AnswerEvent::ToolArguments { text, .. } => {
                    self.delta(BlockDelta::InputJson { partial_json: text }, out);
                }
            }
        }
        if let Some(reason) = &update.end {
            self.close(out);
            let delta = StopDocument::from(reason);
            send(out, &StreamEvent::MessageDelta { delta, usage: usage.into() });
            send(out, &StreamEvent::MessageStop);
        }
    }

    /// Starts a block, unless a block of this kind is open.
    fn open(
        &mut self,
        kind: BlockKind,
        out: &mut EventWriter,
        block: impl FnOnce() -> ContentBlock,
    ) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        self.open = Some(kind);
        let event = StreamEvent::ContentBlockStart { index: self.blocks, content_block: block() };
        send(out, &event);
        if self.blocks == 0 {
            send(out, &StreamEvent::Ping);
        }
    }

    fn delta(&self, delta: BlockDelta, out: &mut EventWriter) {
        send(out, &StreamEvent::ContentBlockDelta { index: self.blocks, delta });
    }

    /// Ends the open block, if a block is open.
    fn close(&mut self, out: &mut EventWriter) {
        if self.open.take().is_some() {
            send(out, &StreamEvent::ContentBlockStop { index: self.blocks });
            self.blocks += 1;
        }
    }
}

fn send(out: &mut EventWriter, event: &StreamEvent<'_>) {
    out.event(event.name(), event);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::AnswerEnd;

    /// Returns the names and the data of the events of updates.
    fn events(thinking: bool, updates: Vec<AnswerUpdate>) -> Vec<(String, serde_json::Value)> {
        let mut writer = EventWriter::default();
        let mut message = MessageEvents::new("msg_1".to_owned(), "m".to_owned(), thinking);
        let usage = AnswerUsage { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 3 };
        updates.into_iter().for_each(|update| message.write(update, usage, &mut writer));
        let text = String::from_utf8(writer.take().to_vec()).unwrap();
        let event = |event: &str| {
            let (name, data) = event.split_once("\ndata: ").unwrap();
            let name = name.strip_prefix("event: ").unwrap().to_owned();
            (name, serde_json::from_str(data).unwrap())
        };
        text.split_terminator("\n\n").map(event).collect()
    }

    fn update(parts: Vec<AnswerEvent>, end: Option<AnswerEnd>) -> AnswerUpdate {
        AnswerUpdate { parts, end, ..AnswerUpdate::default() }
    }

    #[test]
    fn blocks_start_and_end_in_order() {
        let updates = vec![
            update(vec![AnswerEvent::Reasoning("hm".into())], None),
            update(vec![AnswerEvent::Content("a".into())], None),
            update(
                vec![
                    AnswerEvent::Content("b".into()),
                    AnswerEvent::ToolCallStart { index: 0, name: "f".into() },
                    AnswerEvent::ToolArguments { index: 0, text: "{\"x\": 1}".into() },
                ],
                None,
            ),
            update(Vec::new(), Some(AnswerEnd::ToolCalls)),
        ];
        let events = events(true, updates);
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "message_start",
                "content_block_start",
                "ping",
                "content_block_delta",
                "content_block_stop",
                "content_block_start",
                "content_block_delta",
                "content_block_delta",
                "content_block_stop",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
        );
        let usage = &events[0].1["message"]["usage"];
        assert_eq!(usage["input_tokens"], 3);
        assert_eq!(usage["cache_read_input_tokens"], 2);
        assert_eq!(events[3].1["delta"]["thinking"], "hm");
        assert_eq!(events[9].1["content_block"]["name"], "f");
        assert_eq!(events[9].1["content_block"]["input"], serde_json::json!({}));
        assert_eq!(events[10].1["delta"]["partial_json"], "{\"x\": 1}");
        assert_eq!(events[10].1["index"], 2);
        assert_eq!(events[12].1["delta"]["stop_reason"], "tool_use");
        assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()));
    }

    #[test]
    fn reasoning_is_left_out_unless_thinking_is_enabled() {
        let updates = vec![
            update(vec![AnswerEvent::Reasoning("hm".into())], None),
            update(vec![AnswerEvent::Content("a".into())], Some(AnswerEnd::StopString("x".into()))),
        ];
        let events = events(false, updates);
        assert_eq!(events.len(), 7, "{events:?}");
        assert_eq!(events[1].1["content_block"]["type"], "text");
        assert_eq!(events[5].1["delta"]["stop_sequence"], "x");
    }
}
