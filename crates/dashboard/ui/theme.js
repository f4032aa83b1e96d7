// @ts-check
// Light and dark: the choice of the reader, or the setting of the system.

/** Colours that colour-blind people can tell apart (Okabe–Ito, adapted for contrast). */
const LIGHT = ["#0b6bcb", "#c4530a", "#00795c", "#a3418f", "#8a6d00", "#3b7ea1", "#444444"];
const DARK = ["#5cb3ff", "#ff9d4d", "#2fd2a6", "#e58fd0", "#f0e442", "#9fd3f2", "#cccccc"];

const system = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : system.matches;
}

/**
 * Colour of the run with an index.
 * @param {number} index
 */
export function palette(index) {
  const colors = isDark() ? DARK : LIGHT;
  return colors[index % colors.length];
}

/**
 * Applies the theme of the reader, and calls `changed` after every change.
 * @param {HTMLElement} button switches between the themes
 * @param {() => void} changed
 */
export function startTheme(button, changed) {
  const apply = () => {
    button.textContent = isDark() ? "☾" : "☀";
    changed();
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("theme", theme);
    apply();
  });
  system.addEventListener("change", apply);
  const chosen = localStorage.getItem("theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
  apply();
}
