//! Readers of foreign files and graphs, on mutated and made-up input: they may refuse, not panic.

use std::fs;

use proptest::prelude::*;
use tinkex_engine::file::{AdapterFile, ModelConfig, ModelFolder, PeftConfig};
use tinkex_engine::loss::graph::{Arg, Graph, GraphInput, Node, Tensor, Values};
use tinkex_engine::optim::{Optimizer, OptimizerKind};
use tinkex_engine::tokenizer::{Tokenizer, Vocabulary};

use crate::golden::folder;

/// Calls and what they take: `x` a tensor, `d` a dimension, `n` a number, `i` an index, `l` a list
/// of tensors, `s` sizes, `b` a truth value, `m` a tensor of truth values or anything else.
const CALLS: [(&str, &str); 78] = [
    ("torch.abs", "x"),
    ("torch.exp", "x"),
    ("torch.log1p", "x"),
    ("sqrt", "x"),
    ("square", "x"),
    ("sign", "x"),
    ("sigmoid", "x"),
    ("tanh", "x"),
    ("relu", "x"),
    ("torch.isnan", "x"),
    ("operator.neg", "x"),
    ("operator.invert", "m"),
    ("torch._C._nn.softplus", "x"),
    ("logsigmoid", "x"),
    ("nan_to_num", "x"),
    ("clamp", "xnn"),
    ("clamp_", "xn"),
    ("torch.clip", "xxx"),
    ("operator.add", "xx"),
    ("operator.sub", "nx"),
    ("operator.mul", "xx"),
    ("operator.truediv", "xx"),
    ("operator.floordiv", "xn"),
    ("operator.mod", "xn"),
    ("operator.pow", "xn"),
    ("operator.gt", "xn"),
    ("operator.le", "xx"),
    ("operator.and_", "mm"),
    ("minimum", "xx"),
    ("torch.maximum", "xx"),
    ("logaddexp", "xx"),
    ("torch.where", "mxx"),
    ("where", "xmx"),
    ("masked_fill", "xmn"),
    ("sum", "x"),
    ("sum", "xd"),
    ("sum", "xdb"),
    ("mean", "xdb"),
    ("prod", "x"),
    ("prod", "xdb"),
    ("amax", "xdb"),
    ("max", "x"),
    ("max", "xd"),
    ("min", "xdb"),
    ("max", "xx"),
    ("var", "x"),
    ("std", "xdb"),
    ("norm", "xn"),
    ("norm", "xnd"),
    ("logsumexp", "xdb"),
    ("softmax", "xd"),
    ("log_softmax", "xd"),
    ("cumsum", "xd"),
    ("any", "xd"),
    ("all", "x"),
    ("torch.nn.functional.mse_loss", "xx"),
    ("torch.nn.functional.huber_loss", "xx"),
    ("reshape", "xs"),
    ("view", "xd"),
    ("flatten", "xdd"),
    ("squeeze", "xd"),
    ("unsqueeze", "xd"),
    ("transpose", "xdd"),
    ("permute", "xdd"),
    ("t", "x"),
    ("expand", "xs"),
    ("expand_as", "xx"),
    ("torch.stack", "ld"),
    ("torch.cat", "ld"),
    ("flip", "xd"),
    ("roll", "xdd"),
    ("gather", "xdx"),
    ("index_select", "xdx"),
    ("operator.getitem", "xi"),
    ("long", "x"),
    ("detach", "x"),
    ("operator.matmul", "xx"),
    ("size", "xd"),
];

fn tensor(nodes: usize) -> impl Strategy<Value = Arg> {
    (0..nodes).prop_map(|i| Arg::Ref(name(i)))
}

fn whole() -> impl Strategy<Value = i64> {
    let far = vec![i64::MIN, i64::MAX, 1 << 40, -(1 << 40), 1 << 20];
    prop_oneof![40 => -2_i64..4, 1 => prop::sample::select(far)]
}

fn number() -> impl Strategy<Value = Arg> {
    prop_oneof![
        4 => (-2.0..2.0).prop_map(Arg::Float),
        2 => whole().prop_map(Arg::Int),
        1 => any::<f64>().prop_map(Arg::Float),
    ]
}

fn index(nodes: usize) -> impl Strategy<Value = Arg> {
    let slice = prop::array::uniform3(prop::option::of(whole()))
        .prop_map(|ends| Arg::Slice(Box::new(ends.map(|end| end.map_or(Arg::None, Arg::Int)))));
    let one = prop_oneof![
        4 => slice,
        4 => whole().prop_map(Arg::Int),
        1 => Just(Arg::None),
        1 => Just(Arg::Ellipsis),
        1 => tensor(nodes),
    ];
    prop_oneof![one.clone(), prop::collection::vec(one, 0..4).prop_map(Arg::Tuple)]
}

/// An argument of this kind, now and then of another.
fn arg(kind: char, nodes: usize) -> BoxedStrategy<Arg> {
    let right = match kind {
        'd' => (-2_i64..3).prop_map(Arg::Int).boxed(),
        'n' => number().boxed(),
        'i' => index(nodes).boxed(),
        'b' => any::<bool>().prop_map(Arg::Bool).boxed(),
        'l' => prop::collection::vec(tensor(nodes), 0..4).prop_map(Arg::List).boxed(),
        's' => prop::collection::vec(whole().prop_map(Arg::Int), 0..4).prop_map(Arg::List).boxed(),
        _ => tensor(nodes).boxed(),
    };
    let wrong = prop_oneof![tensor(nodes), number(), index(nodes), Just(Arg::None)];
    prop_oneof![30 => right, 1 => wrong].boxed()
}

/// Node 0 and 1 are the inputs.
fn name(i: usize) -> String {
    ["logprobs", "w"].get(i).map_or_else(|| format!("n{i}"), |name| (*name).to_owned())
}

fn node(i: usize) -> impl Strategy<Value = Node> {
    prop::sample::select(&CALLS[..]).prop_flat_map(move |(target, kinds)| {
        let args: Vec<_> = kinds.chars().map(|kind| arg(kind, i)).collect();
        args.prop_map(move |args| match target.contains('.') {
            true => Node::function(&name(i), target, args),
            false => Node::method(&name(i), target, args),
        })
    })
}

/// Changes and cuts a file's bytes.
fn mutated(mut bytes: Vec<u8>, changes: &[(prop::sample::Index, u8)], cut: usize) -> Vec<u8> {
    for (at, value) in changes {
        let at = at.index(bytes.len());
        bytes[at] = *value;
    }
    if cut < bytes.len() / 8 {
        bytes.truncate(bytes.len() - cut);
    }
    bytes
}

fn changes() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    // Digits and quotes change meanings, other bytes mostly break them.
    let value = prop_oneof![prop::sample::select(b"0123456789-\",:{}[]eE.".to_vec()), any::<u8>()];
    prop::collection::vec((any::<prop::sample::Index>(), value), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn no_graph_makes_a_panic(
        body in (node(2), node(3), node(4), node(5)),
        shape in prop::sample::select(vec![vec![0], vec![1], vec![5], vec![2, 3], vec![0, 3], vec![3, 0], vec![1, 1]]),
        ints in any::<bool>(),
    ) {
        let (a, b, c, d) = body;
        let mut nodes = vec![Node::placeholder("logprobs"), Node::placeholder("w"), a, b, c, d];
        nodes.push(Node::method("loss", "sum", vec![Arg::Ref(name(5))]));
        nodes.push(Node::output(Arg::Tuple(vec![Arg::node("loss"), Arg::Dict(vec![])])));
        let rank = shape.len();
        let inputs = ["logprobs", "w"].map(|name| GraphInput { name: name.to_owned(), rank });
        if let Ok(graph) = Graph::new(inputs.to_vec(), nodes) {
            let count = shape.iter().product();
            let (floats, wholes) = (vec![-0.5; count], vec![1_i64; count]);
            let other = if ints { Values::I64(&wholes) } else { Values::F32(&floats) };
            let tensors = [
                Tensor { shape: &shape, values: Values::F32(&floats) },
                Tensor { shape: &shape, values: other },
            ];
            if let Ok(out) = graph.evaluate(&tensors) {
                prop_assert!(out.loss.is_finite());
                prop_assert_eq!(out.slope.len(), count);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_text_file_makes_a_panic(changes in changes(), cut in 0_usize..4000) {
        let read = |path: &str| fs::read(folder(path)).unwrap();
        for path in ["llama/config.json", "qwen3/config.json"] {
            let _ = ModelConfig::parse(&mutated(read(path), &changes, cut), "x");
        }
        let tokenizer = mutated(read("tokenizer.json"), &changes, cut);
        let _ = Tokenizer::parse(&tokenizer, "x");
        let _ = Vocabulary::parse(&tokenizer, "x");
        let copy = tempfile::tempdir().unwrap();
        let path = copy.path().join("adapter_config.json");
        fs::write(&path, mutated(read("llama/adapter/adapter_config.json"), &changes, cut)).unwrap();
        let _ = PeftConfig::read(&path);
    }

    #[test]
    fn no_adapter_or_state_makes_a_panic(changes in changes(), cut in 0_usize..4000) {
        let copy = tempfile::tempdir().unwrap();
        let from = folder("qwen2/adapter");
        fs::copy(from.join("adapter_config.json"), copy.path().join("adapter_config.json")).unwrap();
        let tensors = mutated(fs::read(from.join("adapter_model.safetensors")).unwrap(), &changes, cut);
        fs::write(copy.path().join("adapter_model.safetensors"), tensors).unwrap();
        if let Ok(adapter) = AdapterFile::load(copy.path()) {
            for pair in adapter.pairs {
                prop_assert_eq!(pair.a.len(), adapter.config.rank * pair.inputs);
                prop_assert!(pair.b.iter().all(|value| value.is_finite()));
            }
        }
        let path = copy.path().join("optimizer.safetensors");
        Optimizer::new(OptimizerKind::Adam, &[6]).save(&path, &[("w", &[2, 3])]).unwrap();
        fs::write(&path, mutated(fs::read(&path).unwrap(), &changes, cut)).unwrap();
        let _ = Optimizer::load(&path, OptimizerKind::Adam, &[("w", &[2, 3])]);
    }

    #[test]
    fn no_index_makes_a_panic(changes in changes(), cut in 0_usize..4000) {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(folder("qwen2")).unwrap() {
            let entry = entry.unwrap();
            if entry.path().is_file() {
                let bytes = fs::read(entry.path()).unwrap();
                let index = entry.path().extension().is_some_and(|end| end == "json")
                    && entry.file_name().to_string_lossy().contains("index");
                let bytes = if index { mutated(bytes, &changes, cut) } else { bytes };
                fs::write(copy.path().join(entry.file_name()), bytes).unwrap();
            }
        }
        let _ = ModelFolder::open(copy.path());
    }
}
