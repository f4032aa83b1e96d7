// Elements. Every value from the server is inserted as text.

/** Creates an element. Attributes with a function are listeners; children are elements or text. */
export function h(tag, attributes, ...children) {
  const svg = tag.startsWith("svg:");
  const element = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replaces the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Calls `action` at most once per animation frame. */
export function perFrame(action) {
  let frame = 0;
  return () => {
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; action(); });
  };
}

/** Calls `action` after `delay` milliseconds without another call. */
export function debounce(delay, action) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay);
  };
}

let toastTimer = 0;

/** Shows a short message. */
export function toast(text) {
  const element = document.getElementById("toast");
  element.textContent = text;
  element.classList.add("shown");
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => element.classList.remove("shown"), 2500);
}

/** Copies a text to the clipboard. */
export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that are not on localhost or HTTPS have no clipboard.
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast(what);
}

export function copyButton(text, label) {
  return h("button", {
    class: "icon small", type: "button", title: `Copy ${label}`, "aria-label": `Copy ${label}`,
    click: (event) => { event.preventDefault(); event.stopPropagation(); copy(text, `Copied ${label}`); },
  }, copyIcon());
}

/** Two sheets, one behind the other. */
function copyIcon() {
  return h("svg:svg", { width: 14, height: 14, viewBox: "0 0 16 16", "aria-hidden": "true", class: "glyph" },
    h("svg:rect", { x: 5.5, y: 5.5, width: 8, height: 8, rx: 1.5 }),
    h("svg:path", { d: "M10.5 3.5v-.5a1.5 1.5 0 0 0-1.5-1.5H4A1.5 1.5 0 0 0 2.5 3v5A1.5 1.5 0 0 0 4 9.5h.5" }));
}

const tip = () => document.getElementById("tip");

/** Shows a tooltip next to a rectangle of the window. */
export function showTip(rectangle, ...content) {
  const element = fill(tip(), ...content);
  element.hidden = false;
  // At the right edge the element would be narrower than its content.
  element.style.left = "0";
  const { width, height } = element.getBoundingClientRect();
  const left = Math.max(8, Math.min(rectangle.left, innerWidth - width - 8));
  const below = rectangle.bottom + 6;
  const top = below + height > innerHeight ? Math.max(8, rectangle.top - height - 6) : below;
  element.style.left = `${left}px`;
  element.style.top = `${top}px`;
}

export function hideTip() {
  tip().hidden = true;
}

/** An empty state: what is missing, and the command that changes it. */
export function empty(title, text, command) {
  return h("div", { class: "empty" },
    h("h2", {}, title),
    text && h("p", {}, text),
    command && h("div", { class: "command" }, h("code", {}, command), copyButton(command, "command")));
}

/** A problem, with what to do about it. */
export function problem(error, retry) {
  return h("div", { class: "empty", role: "alert" },
    h("h2", {}, "Cannot load this"),
    h("p", {}, error.message ?? String(error)),
    retry && h("button", { type: "button", click: retry }, "Try again"));
}
