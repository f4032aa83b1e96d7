//! Generates short stories from sentence templates.

use super::words::{
    ANIMALS, CorpusRng, FOODS, MOODS, NAMES, PLACES, THINGS, TRAITS, WEATHER, capitalized,
    with_article,
};

const OPENINGS: [&str; 8] = [
    "Once there was {a_trait} {kind} named {name}.",
    "{name} was {a_trait} {kind} who lived near the {place}.",
    "One {weather} morning, {name} the {kind} woke up early.",
    "On a {weather} day, {a_trait} {kind} named {name} went to the {place}.",
    "In a house by the {place} lived {a_trait} {kind}. {He} was called {name}.",
    "{name} the {kind} loved the {place} more than any other place.",
    "It was a {weather} evening, and {name} the {kind} was still awake.",
    "There once lived {a_trait} {kind} near the {place}. The name of the {kind} was {name}.",
];

const WISHES: [&str; 8] = [
    "{He} had {a_color} {thing} and took it everywhere.",
    "More than anything, {he} wanted {a_color} {thing}.",
    "{He} had heard of {a_color} {thing} that was hidden in the {far}.",
    "That day {he} was looking for {his} {color} {thing}.",
    "{He} wanted to give {a_color} {thing} to {his} friend {friend}.",
    "{He} had lost {his} {color} {thing} and felt {feeling}.",
    "All {he} could think of was the {color} {thing} from the {far}.",
    "{His} grandmother had asked {him} to bring {a_color} {thing} from the {far}.",
];

const TROUBLES: [&str; 8] = [
    "But the way to the {far} was long, and {he} did not know it.",
    "But then it began to rain, and the path was full of mud.",
    "But the {thing} was high up in a tree, and {he} could not reach it.",
    "But when {he} came to the {far}, the {thing} was gone.",
    "But {he} was {feeling} and had to sit down for a while.",
    "But the wind took the {thing} and carried it over the {far}.",
    "But the gate of the {far} was closed, and nobody was there.",
    "But {he} had no idea where to begin.",
];

const MEETINGS: [&str; 7] = [
    "Just then {friend} the {other} came along. \"Why do you look so {feeling}?\" asked {friend}.",
    "{friend} the {other} saw {him} and said, \"{sound}! Can I help you?\"",
    "Near the {far} {he} met {friend}, {a_other} with some {food}. \"Come, eat with me,\" said {friend}.",
    "\"Do not worry,\" said a voice. It was {friend} the {other}.",
    "At last {he} asked {friend} the {other} for help. \"Of course,\" said {friend}.",
    "{friend} the {other} was sitting there, eating {food}. \"I can show you the way,\" said {friend}.",
    "\"{sound},\" said {friend} the {other}. \"What are you looking for?\" \"My {thing},\" said {name}.",
];

const TURNS: [&str; 7] = [
    "Together they looked behind every tree, and there it was: the {color} {thing}!",
    "{friend} had a good idea. They used a long stick, and soon {name} held the {thing}.",
    "They walked and walked until they found the {thing} under a bush by the {far}.",
    "{friend} climbed up, and a moment later the {color} {thing} was safe.",
    "They waited until the sun came out. Then they saw the {thing} shine in the grass.",
    "\"Look over there!\" said {friend}. The {color} {thing} was lying next to a stone.",
    "It took them all afternoon, but in the end they had the {thing}.",
];

const ENDINGS: [&str; 8] = [
    "{name} was very happy and thanked {friend}.",
    "\"Thank you,\" said {name}. \"You are a good friend.\"",
    "After that day, {name} and {friend} were friends.",
    "They shared some {food} and watched the stars.",
    "{name} learned that it is good to ask for help.",
    "That night {name} slept well, with the {thing} next to {his} bed.",
    "\"Let us come back tomorrow,\" said {friend}, and {name} said yes.",
    "And so {name} and {friend} went home together, tired but happy.",
];

/// Generates a story.
pub(super) fn write(rng: &mut CorpusRng) -> String {
    let who = rng.choose(&NAMES);
    let friend = rng.choose_other(&NAMES, who);
    let animal = rng.choose(&ANIMALS);
    let other = rng.choose_other(&ANIMALS, animal);
    // Half of the main characters are people, the others animals.
    let kind = match (rng.below(2), who.1) {
        (0, _) => animal.0,
        (_, true) => "girl",
        (_, false) => "boy",
    };
    let place = rng.choose(&PLACES);
    let far = rng.choose_other(&PLACES, place);
    let (thing, color) = rng.choose(&THINGS);
    let [he, him, his] = if who.1 { ["she", "her", "her"] } else { ["he", "him", "his"] };
    let a_trait = with_article(rng.choose(&TRAITS));
    let a_color = with_article(color);
    let a_other = with_article(other.0);
    let he_first = capitalized(he);
    let his_first = capitalized(his);
    let sound = capitalized(other.1);
    let feeling = rng.choose(&MOODS);
    let slots = [
        ("name", who.0),
        ("kind", kind),
        ("a_trait", &a_trait),
        ("he", he),
        ("him", him),
        ("his", his),
        ("He", &he_first),
        ("His", &his_first),
        ("place", place),
        ("far", far),
        ("thing", thing),
        ("color", color),
        ("a_color", &a_color),
        ("friend", friend.0),
        ("other", other.0),
        ("a_other", &a_other),
        ("sound", &sound),
        ("feeling", feeling),
        ("weather", rng.choose(&WEATHER)),
        ("food", rng.choose(&FOODS)),
    ];
    let mut parts = Vec::new();
    for part in [&OPENINGS[..], &WISHES, &TROUBLES, &MEETINGS, &TURNS] {
        parts.push(rng.fill(part, &slots));
    }
    let first = rng.below(ENDINGS.len());
    parts.push(rng.fill(&ENDINGS[first..=first], &slots));
    if rng.below(2) == 0 {
        let second = (first + 1 + rng.below(ENDINGS.len() - 1)) % ENDINGS.len();
        parts.push(rng.fill(&ENDINGS[second..=second], &slots));
    }
    let joint = if rng.below(3) == 0 { "\n" } else { " " };
    parts.join(joint)
}
