//! The text that the built-in model learns from: small stories, and questions with answers.
//!
//! All of it is put together from the words below, which were written for this purpose. It is
//! licensed as the rest of this repository.

use fastrand::Rng;

const NAMES: [&str; 24] = [
    "Anna", "Ben", "Clara", "David", "Ella", "Felix", "Grace", "Hugo", "Ida", "Jack", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wanda", "Yara", "Zoe",
];
/// An animal, what it says, and what it likes.
const ANIMALS: [(&str, &str, &str); 14] = [
    ("dog", "woof", "bones"),
    ("cat", "meow", "fish"),
    ("cow", "moo", "grass"),
    ("duck", "quack", "bread"),
    ("sheep", "baa", "clover"),
    ("pig", "oink", "apples"),
    ("horse", "neigh", "carrots"),
    ("mouse", "squeak", "cheese"),
    ("frog", "ribbit", "flies"),
    ("bee", "buzz", "flowers"),
    ("owl", "hoot", "the night"),
    ("lion", "roar", "meat"),
    ("crow", "caw", "shiny things"),
    ("snake", "hiss", "warm stones"),
];
/// A thing and its colour.
const THINGS: [(&str, &str); 20] = [
    ("apple", "red"), ("banana", "yellow"), ("leaf", "green"), ("sky", "blue"), ("snow", "white"),
    ("coal", "black"), ("carrot", "orange"), ("plum", "purple"), ("lemon", "yellow"),
    ("grass", "green"), ("cherry", "red"), ("sea", "blue"), ("milk", "white"), ("mud", "brown"),
    ("frog", "green"), ("pig", "pink"), ("elephant", "grey"), ("night", "black"), ("rose", "red"),
    ("bear", "brown"),
];
const OPPOSITES: [(&str, &str); 20] = [
    ("big", "small"), ("hot", "cold"), ("fast", "slow"), ("happy", "sad"), ("day", "night"),
    ("up", "down"), ("old", "young"), ("wet", "dry"), ("full", "empty"), ("good", "bad"),
    ("open", "closed"), ("early", "late"), ("hard", "soft"), ("light", "dark"), ("near", "far"),
    ("high", "low"), ("loud", "quiet"), ("rich", "poor"), ("strong", "weak"), ("long", "short"),
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const NUMBERS: [&str; 21] = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
];
const PLACES: [&str; 12] = [
    "forest", "garden", "kitchen", "village", "park", "library", "barn", "market", "school",
    "harbour", "meadow", "castle",
];
const OBJECTS: [&str; 16] = [
    "ball", "book", "lamp", "key", "boat", "hat", "drum", "kite", "box", "bell", "map", "stone",
    "basket", "coat", "clock", "letter",
];
const KINDS: [&str; 14] = [
    "little", "old", "red", "shiny", "heavy", "tiny", "golden", "broken", "wooden", "strange",
    "beautiful", "new", "blue", "quiet",
];
const FEELINGS: [&str; 10] = [
    "happy", "sad", "tired", "proud", "afraid", "curious", "hungry", "surprised", "calm", "angry",
];
const WEATHER: [&str; 6] = ["sunny", "rainy", "windy", "cold", "warm", "foggy"];
const CAPITALS: [(&str, &str); 14] = [
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin"),
    ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Greece", "Athens"), ("Norway", "Oslo"),
    ("Kenya", "Nairobi"), ("Peru", "Lima"), ("Canada", "Ottawa"), ("Portugal", "Lisbon"),
    ("Austria", "Vienna"), ("Cuba", "Havana"),
];

fn pick<'a, T: Copy + 'a>(random: &mut Rng, list: &'a [T]) -> T {
    list[random.usize(..list.len())]
}

/// One document.
pub(crate) fn document(random: &mut Rng) -> String {
    match random.u8(..10) {
        0..4 => story(random),
        _ => {
            let turns = random.usize(1..4);
            (0..turns).map(|_| exchange(random)).collect()
        }
    }
}

fn exchange(random: &mut Rng) -> String {
    let (question, answer) = question(random);
    format!(
        "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    )
}

fn question(random: &mut Rng) -> (String, String) {
    let name = pick(random, &NAMES);
    let (a, b) = (random.usize(..11), random.usize(..11));
    match random.u8(..17) {
        0 | 1 => (format!("What is {a} + {b}?"), format!("{a} + {b} = {}", a + b)),
        2 => {
            let (a, b) = (a.max(b), a.min(b));
            (format!("What is {a} - {b}?"), format!("{a} - {b} = {}", a - b))
        }
        3 => {
            let (animal, sound, _) = pick(random, &ANIMALS);
            (format!("What does a {animal} say?"), format!("A {animal} says {sound}."))
        }
        4 => {
            let (animal, _, food) = pick(random, &ANIMALS);
            (format!("What does a {animal} like?"), format!("A {animal} likes {food}."))
        }
        5 => {
            let (thing, colour) = pick(random, &THINGS);
            (format!("What colour is the {thing}?"), format!("The {thing} is {colour}."))
        }
        6 => {
            let (word, other) = pick(random, &OPPOSITES);
            let (word, other) = if random.bool() { (word, other) } else { (other, word) };
            (format!("What is the opposite of {word}?"), format!("The opposite of {word} is {other}."))
        }
        7 => {
            let day = random.usize(..7);
            let (ask, shift) = if random.bool() { ("after", 1) } else { ("before", 6) };
            let other = DAYS[(day + shift) % 7];
            (format!("Which day comes {ask} {}?", DAYS[day]), format!("{other} comes {ask} {}.", DAYS[day]))
        }
        8 => (format!("Hello, my name is {name}."), format!("Hello {name}, how can I help you?")),
        9 => {
            let word = pick(random, &OBJECTS);
            let letters: Vec<String> = word.chars().map(|letter| letter.to_string()).collect();
            (format!("Spell the word {word}."), letters.join("-"))
        }
        10 => {
            let (from, to) = (a.min(b), a.min(b) + random.usize(1..8));
            let list: Vec<String> = (from..=to).map(|n| n.to_string()).collect();
            (format!("Count from {from} to {to}."), list.join(", "))
        }
        11 => {
            let number = random.usize(..21);
            (format!("Write {number} as a word."), NUMBERS[number].to_owned())
        }
        12 => {
            let words: Vec<&str> = (0..random.usize(1..4)).map(|_| pick(random, &OBJECTS)).collect();
            let words = words.join(" ");
            (format!("Say this again: {words}"), words)
        }
        13 => {
            let (country, city) = pick(random, &CAPITALS);
            (format!("What is the capital of {country}?"), format!("The capital of {country} is {city}."))
        }
        14 => {
            let word = if a > b { "Yes" } else { "No" };
            let verb = if a > b { "is" } else { "is not" };
            (format!("Is {a} larger than {b}?"), format!("{word}, {a} {verb} larger than {b}."))
        }
        15 => {
            let (object, kind) = (pick(random, &OBJECTS), pick(random, &KINDS));
            let place = pick(random, &PLACES);
            let story = format!("{name} put the {kind} {object} in the {place}.");
            (format!("{story} Where is the {object}?"), format!("The {object} is in the {place}."))
        }
        _ => ("Tell me a story.".to_owned(), story(random)),
    }
}

fn story(random: &mut Rng) -> String {
    let (hero, friend) = (pick(random, &NAMES), pick(random, &NAMES));
    let (object, kind, place) =
        (pick(random, &OBJECTS), pick(random, &KINDS), pick(random, &PLACES));
    let (animal, sound, food) = pick(random, &ANIMALS);
    let (before, after) = (pick(random, &FEELINGS), pick(random, &FEELINGS));
    let weather = pick(random, &WEATHER);
    let mut out = match random.u8(..4) {
        0 => format!("Once upon a time there was a child named {hero} who lived near the {place}. "),
        1 => format!("One {weather} morning {hero} went to the {place}. "),
        2 => format!("{hero} and {friend} were friends, and they often met in the {place}. "),
        _ => format!("It was a {weather} day, and {hero} felt {before}. "),
    };
    for _ in 0..random.usize(2..5) {
        out += &match random.u8(..9) {
            0 => format!("There {hero} found a {kind} {object}. "),
            1 => format!("\"Look at my {object}!\" said {hero}. "),
            2 => format!("\"{}!\" said the {animal}, because it wanted {food}. ", capital(sound)),
            3 => format!("{friend} came along and asked, \"Where is the {object}?\" "),
            4 => format!("They looked for the {object} everywhere, but it was not in the {place}. "),
            5 => format!("A {animal} sat beside the {object} and did not move. "),
            6 => format!("{hero} gave the {animal} some {food}, and the {animal} was {after}. "),
            7 => format!("The {place} was {weather} and quiet. "),
            _ => format!("\"I am {before},\" said {friend}, \"let us go home.\" "),
        };
    }
    out += &match random.u8(..4) {
        0 => format!("In the end {hero} was {after} and went home."),
        1 => format!("{hero} kept the {object} for a long time."),
        2 => format!("From that day on {hero} and the {animal} were friends."),
        _ => format!("That night {hero} slept well and dreamt of the {place}."),
    };
    out
}

fn capital(word: &str) -> String {
    word[..1].to_uppercase() + &word[1..]
}
