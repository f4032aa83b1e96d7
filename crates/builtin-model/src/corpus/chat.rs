//! Generates conversations: short questions with short answers.

use super::sums::sum;
use super::words::{
    ANIMALS, COUNTRIES, CorpusRng, DAYS, FEELINGS, FOODS, MONTHS, NAMES, NUMBERS, OPPOSITES,
    PLACES, THINGS, capitalized, with_article,
};
use super::{TURN_END, TURN_START};

/// Generates a conversation of one to four questions with answers.
pub(super) fn write(rng: &mut CorpusRng) -> String {
    let count = 1 + rng.below(4);
    let mut messages = Vec::with_capacity(2 * count);
    for _ in 0..count {
        let (question, answer) = exchange(rng);
        messages.push(message("user", &question));
        messages.push(message("assistant", &answer));
    }
    messages.join("\n")
}

/// Returns a message of a conversation in the chat format.
fn message(role: &str, text: &str) -> String {
    format!("{TURN_START}{role}\n{text}{TURN_END}")
}

/// Returns a question and its answer.
fn exchange(rng: &mut CorpusRng) -> (String, String) {
    match rng.below(16) {
        0..=2 => arithmetic(rng),
        3 => color(rng),
        4 => opposite(rng),
        5 => capital_city(rng),
        6 => after(rng),
        7 => sound(rng),
        8 => legs(rng),
        9 => repeat(rng),
        10 => in_order(rng),
        11 => spelling(rng),
        12 => choice(rng),
        13 => greeting(rng),
        14 => counting(rng),
        _ => who_has(rng),
    }
}

fn arithmetic(rng: &mut CorpusRng) -> (String, String) {
    let (text, result) = sum(rng);
    let ask = ["What is {sum}?", "{sum} = ?", "Please compute {sum}.", "How much is {sum}?"];
    (rng.fill(&ask, &[("sum", &text)]), result.to_string())
}

fn color(rng: &mut CorpusRng) -> (String, String) {
    let (thing, color) = rng.choose(&THINGS);
    let (name, _) = rng.choose(&NAMES);
    let tell = ["{name} has {a_color} {thing}. What color is the {thing}?"];
    let slots = [("name", name), ("a_color", &with_article(color)), ("thing", thing)];
    (rng.fill(&tell, &slots), format!("The {thing} is {color}."))
}

fn opposite(rng: &mut CorpusRng) -> (String, String) {
    let (one, other) = rng.choose(&OPPOSITES);
    let (one, other) = if rng.below(2) == 0 { (one, other) } else { (other, one) };
    let ask = ["What is the opposite of {word}?", "Tell me the opposite of {word}."];
    (rng.fill(&ask, &[("word", one)]), format!("The opposite of {one} is {other}."))
}

fn capital_city(rng: &mut CorpusRng) -> (String, String) {
    let (country, city) = rng.choose(&COUNTRIES);
    if rng.below(3) == 0 {
        return (
            format!("{city} is the capital of which country?"),
            format!("{city} is the capital of {country}."),
        );
    }
    let ask = ["What is the capital of {country}?", "Which city is the capital of {country}?"];
    (rng.fill(&ask, &[("country", country)]), format!("The capital of {country} is {city}."))
}

fn after(rng: &mut CorpusRng) -> (String, String) {
    if rng.below(2) == 0 {
        let at = rng.below(DAYS.len());
        let next = DAYS[(at + 1) % DAYS.len()];
        let day = DAYS[at];
        return (format!("Which day comes after {day}?"), format!("{next} comes after {day}."));
    }
    let at = rng.below(MONTHS.len());
    let month = MONTHS[at];
    let next = MONTHS[(at + 1) % MONTHS.len()];
    (format!("Which month comes after {month}?"), format!("{next} comes after {month}."))
}

fn sound(rng: &mut CorpusRng) -> (String, String) {
    let (animal, sound, _) = rng.choose(&ANIMALS);
    let ask = ["What does {an} say?", "Which sound does {an} make?"];
    let an = with_article(animal);
    (rng.fill(&ask, &[("an", &an)]), format!("{} says \"{sound}\".", capitalized(&an)))
}

fn legs(rng: &mut CorpusRng) -> (String, String) {
    let (animal, _, legs) = rng.choose(&ANIMALS);
    let legs = match legs {
        0 => "no",
        legs => NUMBERS[usize::from(legs)],
    };
    let an = with_article(animal);
    (format!("How many legs does {an} have?"), format!("{} has {legs} legs.", capitalized(&an)))
}

fn repeat(rng: &mut CorpusRng) -> (String, String) {
    let words: Vec<&str> = rng.choose_several(&FOODS, 3).into_iter().copied().collect();
    let text = words.join(" ");
    let ask = ["Repeat after me: {text}", "Please say: {text}"];
    (rng.fill(&ask, &[("text", &text)]), text)
}

fn in_order(rng: &mut CorpusRng) -> (String, String) {
    let mut words: Vec<&str> = rng.choose_several(&PLACES, 3).into_iter().copied().collect();
    let given = words.join(", ");
    if rng.below(2) == 0 {
        words.reverse();
        return (format!("Say these words backwards: {given}"), words.join(", "));
    }
    words.sort_unstable();
    (format!("Sort these words by the alphabet: {given}"), words.join(", "))
}

fn spelling(rng: &mut CorpusRng) -> (String, String) {
    let word = rng.choose(&FOODS);
    let letters: Vec<String> = word.chars().map(|c| c.to_string()).collect();
    if rng.below(2) == 0 {
        return (format!("How do you spell {word}?"), letters.join("-"));
    }
    let count = NUMBERS[letters.len()];
    (format!("How many letters are in the word {word}?"), capitalized(&format!("{count}.")))
}

fn choice(rng: &mut CorpusRng) -> (String, String) {
    let x = rng.below(100);
    let y = rng.below(100);
    let answer = match x.cmp(&y) {
        std::cmp::Ordering::Less => format!("{y} is larger than {x}."),
        std::cmp::Ordering::Greater => format!("{x} is larger than {y}."),
        std::cmp::Ordering::Equal => "They are the same.".to_owned(),
    };
    (format!("Which number is larger, {x} or {y}?"), answer)
}

fn greeting(rng: &mut CorpusRng) -> (String, String) {
    let (name, _) = rng.choose(&NAMES);
    let feeling = rng.choose(&FEELINGS);
    let pairs: [(&str, &str); 6] = [
        ("Hello! My name is {name}.", "Hello, {name}! How can I help you?"),
        ("Hi, I am {name}. Who are you?", "Hi, {name}! I am a tiny language model."),
        ("Good morning!", "Good morning! What would you like to do today?"),
        ("I am {feeling} today.", "Thank you for telling me that you are {feeling}."),
        ("Thank you very much!", "You are welcome!"),
        ("Goodbye, see you tomorrow.", "Goodbye, and have a nice day!"),
    ];
    let (question, answer) = rng.choose(&pairs);
    let slots = [("name", name), ("feeling", feeling)];
    (rng.fill(&[question], &slots), rng.fill(&[answer], &slots))
}

fn counting(rng: &mut CorpusRng) -> (String, String) {
    let from = 1 + rng.below(12);
    let to = from + 2 + rng.below(6);
    let all: Vec<String> = (from..=to).map(|n| n.to_string()).collect();
    (format!("Count from {from} to {to}."), format!("{}.", all.join(", ")))
}

fn who_has(rng: &mut CorpusRng) -> (String, String) {
    let names = rng.choose_several(&NAMES, 2);
    let things = rng.choose_several(&THINGS, 2);
    let (first, _) = names[0];
    let (second, _) = names[1];
    let (one, _) = things[0];
    let (two, _) = things[1];
    let story = format!("{first} has {}. {second} has {}.", with_article(one), with_article(two));
    if rng.below(2) == 0 {
        let (asked, name) = if rng.below(2) == 0 { (one, first) } else { (two, second) };
        return (format!("{story} Who has the {asked}?"), format!("{name} has the {asked}."));
    }
    let (asked, thing) = if rng.below(2) == 0 { (first, one) } else { (second, two) };
    (format!("{story} What does {asked} have?"), format!("{asked} has {}.", with_article(thing)))
}
