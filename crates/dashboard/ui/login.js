// @ts-check
// The login form.

import { Unauthorized, errorText, post } from "./api.js";
import { h } from "./dom.js";

/**
 * Returns the form, and the field for the key.
 * @param {() => void} loggedIn
 */
export function loginForm(loggedIn) {
  const input = h("input", {
    type: "password", id: "key", autocomplete: "current-password", required: true, spellcheck: "false",
    placeholder: "tml-…",
  });
  const note = h("p", { class: "error", role: "alert", id: "login-error" });
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    note.textContent = "";
    try {
      await post("login", { key: input.value });
    } catch (error) {
      note.textContent = error instanceof Unauthorized ? "This is not the key of the server." : errorText(error);
      input.select();
      return;
    }
    loggedIn();
  };
  const form = h("form", { class: "login", submit },
    h("h1", {}, "Log in"),
    h("p", {}, "Enter the API key of the server. It is in the file ", h("code", {}, "key"),
      " of its data folder, or in the file of ", h("code", {}, "--api-key-file"), "."),
    h("label", { for: "key" }, "API key"), input, note,
    h("button", { class: "primary", type: "submit" }, "Log in"),
    h("p", { class: "muted" }, "Or run ", h("code", {}, "tinkex dashboard"), " on the machine of the server."));
  return { form, input };
}
