//! Word lists, and the random choices from them.

use tinkex_engine::builtin_model_tools::RandomBits;

/// Random choices of one document, determined by its seed and index.
pub(super) struct CorpusRng(RandomBits);

impl CorpusRng {
    pub(super) fn new(seed: u64, index: u64) -> Self {
        Self(RandomBits::new(seed, index))
    }

    /// Returns a uniform number below `limit`, which must not be 0.
    pub(super) fn below(&mut self, limit: usize) -> usize {
        let limit = u64::try_from(limit).unwrap_or(u64::MAX);
        usize::try_from(self.0.next_u64() % limit).unwrap_or(0)
    }

    /// Returns a random element of `from`.
    pub(super) fn choose<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Returns a random element of `from` other than `other`. `from` must have at least two
    /// elements.
    pub(super) fn choose_other<T: Copy + PartialEq>(&mut self, from: &[T], other: T) -> T {
        let start = self.below(from.len());
        let order = from[start..].iter().chain(&from[..start]);
        let mut rest = order.filter(|item| **item != other);
        rest.next().copied().unwrap_or(other)
    }

    /// Returns a random template of `from` with its slots, such as `{name}`, filled in.
    pub(super) fn fill(&mut self, from: &[&str], slots: &[(&str, &str)]) -> String {
        let mut text = self.choose(from).to_owned();
        for (slot, value) in slots {
            text = text.replace(&format!("{{{slot}}}"), value);
        }
        text
    }

    /// Returns `count` different elements of `from`, in random order.
    pub(super) fn choose_several<'a, T>(&mut self, from: &'a [T], count: usize) -> Vec<&'a T> {
        let mut order: Vec<&T> = from.iter().collect();
        let count = count.min(order.len());
        for i in 0..count {
            let other = i + self.below(order.len() - i);
            order.swap(i, other);
        }
        order.truncate(count);
        order
    }
}

/// Returns `noun` with its indefinite article.
pub(super) fn with_article(noun: &str) -> String {
    let article = if noun.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {noun}")
}

/// Returns `text` with a capital first letter.
pub(super) fn capitalized(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|c| c.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

/// Names, and whether the pronoun is "she".
pub(super) const NAMES: [(&str, bool); 32] = [
    ("Mia", true),
    ("Tom", false),
    ("Lily", true),
    ("Ben", false),
    ("Anna", true),
    ("Max", false),
    ("Sara", true),
    ("Leo", false),
    ("Nora", true),
    ("Sam", false),
    ("Ella", true),
    ("Jack", false),
    ("Ruby", true),
    ("Oscar", false),
    ("Ivy", true),
    ("Felix", false),
    ("Clara", true),
    ("Hugo", false),
    ("Rosa", true),
    ("Finn", false),
    ("Emma", true),
    ("Theo", false),
    ("Zoe", true),
    ("Paul", false),
    ("June", true),
    ("Otto", false),
    ("Vera", true),
    ("Karl", false),
    ("Alma", true),
    ("Noah", false),
    ("Iris", true),
    ("Erik", false),
];

/// Animals with their sound and number of legs.
pub(super) const ANIMALS: [(&str, &str, u8); 20] = [
    ("cat", "meow", 4),
    ("dog", "woof", 4),
    ("cow", "moo", 4),
    ("duck", "quack", 2),
    ("sheep", "baa", 4),
    ("pig", "oink", 4),
    ("horse", "neigh", 4),
    ("frog", "ribbit", 4),
    ("owl", "hoot", 2),
    ("hen", "cluck", 2),
    ("bee", "buzz", 6),
    ("lion", "roar", 4),
    ("mouse", "squeak", 4),
    ("crow", "caw", 2),
    ("goat", "maa", 4),
    ("snake", "hiss", 0),
    ("wolf", "howl", 4),
    ("bear", "growl", 4),
    ("donkey", "hee-haw", 4),
    ("turkey", "gobble", 2),
];

pub(super) const PLACES: [&str; 20] = [
    "park", "garden", "forest", "river", "lake", "beach", "market", "farm", "school", "library",
    "hill", "village", "meadow", "bridge", "harbor", "kitchen", "barn", "orchard", "pond",
    "bakery",
];

/// Objects with their color.
pub(super) const THINGS: [(&str, &str); 24] = [
    ("ball", "red"),
    ("kite", "blue"),
    ("book", "green"),
    ("hat", "yellow"),
    ("boat", "white"),
    ("drum", "orange"),
    ("bell", "silver"),
    ("lamp", "golden"),
    ("scarf", "purple"),
    ("basket", "brown"),
    ("coat", "black"),
    ("cup", "pink"),
    ("apple", "red"),
    ("feather", "gray"),
    ("key", "silver"),
    ("shell", "white"),
    ("stone", "gray"),
    ("flute", "brown"),
    ("map", "yellow"),
    ("umbrella", "blue"),
    ("ring", "golden"),
    ("flower", "purple"),
    ("egg", "white"),
    ("carrot", "orange"),
];

pub(super) const FEELINGS: [&str; 10] =
    ["happy", "sad", "tired", "proud", "curious", "brave", "hungry", "calm", "afraid", "excited"];

/// Moods of a character who needs help.
pub(super) const MOODS: [&str; 6] = ["sad", "tired", "worried", "afraid", "hungry", "lonely"];

pub(super) const TRAITS: [&str; 12] = [
    "little", "kind", "clever", "shy", "brave", "quiet", "cheerful", "old", "young", "gentle",
    "busy", "funny",
];

pub(super) const WEATHER: [&str; 8] =
    ["sunny", "rainy", "windy", "cold", "warm", "cloudy", "foggy", "snowy"];

pub(super) const FOODS: [&str; 14] = [
    "bread", "soup", "cheese", "honey", "rice", "cake", "corn", "milk", "berries", "nuts", "pie",
    "beans", "carrots", "pears",
];

pub(super) const OPPOSITES: [(&str, &str); 28] = [
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("day", "night"),
    ("fast", "slow"),
    ("happy", "sad"),
    ("old", "young"),
    ("wet", "dry"),
    ("hard", "soft"),
    ("full", "empty"),
    ("open", "closed"),
    ("high", "low"),
    ("light", "dark"),
    ("loud", "quiet"),
    ("long", "short"),
    ("near", "far"),
    ("strong", "weak"),
    ("early", "late"),
    ("clean", "dirty"),
    ("thick", "thin"),
    ("left", "right"),
    ("black", "white"),
    ("first", "last"),
    ("push", "pull"),
    ("win", "lose"),
    ("rich", "poor"),
    ("true", "false"),
    ("deep", "shallow"),
];

pub(super) const COUNTRIES: [(&str, &str); 24] = [
    ("France", "Paris"),
    ("Italy", "Rome"),
    ("Spain", "Madrid"),
    ("Germany", "Berlin"),
    ("Japan", "Tokyo"),
    ("Egypt", "Cairo"),
    ("Norway", "Oslo"),
    ("Greece", "Athens"),
    ("Portugal", "Lisbon"),
    ("Austria", "Vienna"),
    ("Poland", "Warsaw"),
    ("Ireland", "Dublin"),
    ("Kenya", "Nairobi"),
    ("Peru", "Lima"),
    ("Cuba", "Havana"),
    ("Canada", "Ottawa"),
    ("Sweden", "Stockholm"),
    ("Finland", "Helsinki"),
    ("Hungary", "Budapest"),
    ("Chile", "Santiago"),
    ("China", "Beijing"),
    ("Denmark", "Copenhagen"),
    ("Belgium", "Brussels"),
    ("India", "New Delhi"),
];

pub(super) const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

pub(super) const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

pub(super) const NUMBERS: [&str; 21] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
];
