//! Tests of the parser: its events for whole texts, and the same for all divisions into pieces.

use proptest::prelude::*;

use super::*;

fn parser(reasoning: ReasoningStart) -> AnswerParser {
    AnswerParser::new().reasoning(reasoning).tools(["f", "g"])
}

/// Parses pieces; returns the events with adjacent texts joined.
fn parse(mut parser: AnswerParser, pieces: &[&str]) -> Vec<AnswerEvent> {
    let mut events: Vec<_> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    let mut joined: Vec<AnswerEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(AnswerEvent::Content(last)), AnswerEvent::Content(text))
            | (Some(AnswerEvent::Reasoning(last)), AnswerEvent::Reasoning(text)) => {
                last.push_str(&text);
            }
            (_, event) => joined.push(event),
        }
    }
    joined
}

fn reasoning(text: &str) -> AnswerEvent {
    AnswerEvent::Reasoning(text.to_owned())
}

fn content(text: &str) -> AnswerEvent {
    AnswerEvent::Content(text.to_owned())
}

fn call(index: usize, name: &str, arguments: &str) -> [AnswerEvent; 2] {
    [
        AnswerEvent::ToolCallStart { index, name: name.to_owned() },
        AnswerEvent::ToolArguments { index, text: arguments.to_owned() },
    ]
}

#[test]
fn reasoning_is_split_from_content() {
    for (start, text, expected) in [
        (
            ReasoningStart::Tag,
            "<think>\na b\n</think>\n\nc\n",
            &[reasoning("a b"), content("c\n")][..],
        ),
        (ReasoningStart::Tag, " <think>a", &[reasoning("a")]),
        (ReasoningStart::Tag, "<think>\n\n</think>\n\nc", &[content("c")]),
        (ReasoningStart::Tag, "a <think>b</think>", &[content("a <think>b</think>")]),
        (ReasoningStart::Tag, " <thin", &[content(" <thin")]),
        (ReasoningStart::Opened, "a</think>b", &[reasoning("a"), content("b")]),
        (ReasoningStart::Opened, "<think>a</think>b", &[reasoning("a"), content("b")]),
        (ReasoningStart::Opened, "a </thin", &[reasoning("a </thin")]),
        (ReasoningStart::Never, "<think>a</think>b", &[content("<think>a</think>b")]),
    ] {
        for parser in [parser(start), AnswerParser::new().reasoning(start)] {
            assert_eq!(parse(parser, &[text]), expected, "{text:?}");
        }
    }
}

#[test]
fn tool_calls_with_tags_are_parsed() {
    let text = "Look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                <tool_call>{\"name\": \"h\"}</tool_call>\n";
    let mut expected = vec![content("Look.")];
    expected.extend(call(0, "f", "{\"a\": 1}"));
    expected.extend(call(1, "h", "{}"));
    assert_eq!(parse(parser(ReasoningStart::Never), &[text]), expected);

    let unclosed = "<tool_call>{\"name\": \"f\"}";
    assert_eq!(parse(parser(ReasoningStart::Never), &[unclosed]), call(0, "f", "{}"));
}

#[test]
fn a_tool_call_that_is_not_json_is_content() {
    for text in [
        "a \n<tool_call>f(1)</tool_call> b",
        "<tool_call>{\"name\": \"f\"",
        "<tool_call>{\"name\": \"f\", \"arguments\": 1}</tool_call>\n",
        "a <tool_",
    ] {
        assert_eq!(parse(parser(ReasoningStart::Never), &[text]), [content(text)], "{text}");
    }
}

#[test]
fn without_tools_everything_is_content() {
    let text = "<tool_call>{\"name\": \"f\"}</tool_call> ";
    assert_eq!(parse(AnswerParser::new(), &[text]), [content(text)]);
}

#[test]
fn bare_json_with_the_name_of_a_tool_is_a_tool_call() {
    let text = " {\"name\": \"f\", \"parameters\": {\"a\": \"}\"}}; {\"name\": \"g\"}\n";
    let mut expected = call(0, "f", "{\"a\": \"}\"}").to_vec();
    expected.extend(call(1, "g", "{}"));
    assert_eq!(parse(parser(ReasoningStart::Never), &[text]), expected);

    for text in [
        "{\"name\": \"other\", \"parameters\": {}}",
        " {\"a\": {}}\n",
        "{\"name\": \"f\"",
        "{} {\"name\": \"f\"}",
        "a {\"name\": \"f\"}",
    ] {
        assert_eq!(parse(parser(ReasoningStart::Never), &[text]), [content(text)], "{text}");
    }
}

#[test]
fn reasoning_precedes_tool_calls() {
    let text = "a</think>\n\n<tool_call>{\"name\": \"f\"}</tool_call>";
    let mut expected = vec![reasoning("a")];
    expected.extend(call(0, "f", "{}"));
    assert_eq!(parse(parser(ReasoningStart::Opened), &[text]), expected);
}

#[test]
fn a_tag_that_is_split_over_pieces_waits() {
    let mut parser = parser(ReasoningStart::Tag);
    let pieces = ["<th", "ink>a", " </thi", "nk>", "b <", "c <tool", "_call>{\"na"];
    let events = pieces.map(|piece| parser.push(piece));
    let expected: [&[AnswerEvent]; 7] =
        [&[], &[reasoning("a")], &[], &[], &[content("b")], &[content(" <c")], &[]];
    for (events, expected) in events.iter().zip(expected) {
        assert_eq!(events, expected);
    }
    assert_eq!(parser.finish(), [content(" <tool_call>{\"na")]);
}

/// Parts of answers, valid and invalid.
const PARTS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "{\"name\": \"f\", \"arguments\": {\"é\": 1}}",
    "{\"name\": \"g\"}",
    "{",
    "}",
    "\"",
    ";",
    " ",
    "\n",
    "<",
    "text é",
];

fn answer() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(PARTS), 0..12).prop_map(|parts| parts.concat())
}

fn start() -> impl Strategy<Value = ReasoningStart> {
    prop::sample::select(&[ReasoningStart::Never, ReasoningStart::Tag, ReasoningStart::Opened])
}

proptest! {
    #[test]
    fn the_division_into_pieces_does_not_matter(
        text in answer(),
        start in start(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).collect();
        cuts.retain(|cut| text.is_char_boundary(*cut));
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces: Vec<&str> = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]).collect();
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        let whole = parse(parser(start), &[&text]);
        prop_assert_eq!(&parse(parser(start), &pieces), &whole);
        prop_assert_eq!(&parse(parser(start), &characters), &whole);
        let plain = AnswerParser::new().reasoning(start);
        prop_assert_eq!(parse(plain.clone(), &pieces), parse(plain, &[&text]));
    }

    #[test]
    fn an_answer_without_reasoning_and_calls_is_unchanged(text in answer()) {
        let events = parse(AnswerParser::new(), &[&text]);
        let expected: Vec<_> = (!text.is_empty()).then(|| content(&text)).into_iter().collect();
        prop_assert_eq!(events, expected.clone());
        let events = parse(parser(ReasoningStart::Never), &[&text]);
        if events.iter().all(|event| matches!(event, AnswerEvent::Content(_))) {
            prop_assert_eq!(events, expected);
        }
    }
}
