// @ts-check
// Requests to the server.

/** @import { Documents } from "./documents.js" */

/** The session has ended, or none was started. */
export class Unauthorized extends Error {}

/** What was asked for does not exist, or not any more. */
export class NotFound extends Error {}

/**
 * Text of any thrown value.
 * @param {unknown} error
 */
export function errorText(error) {
  return error instanceof Error ? error.message : String(error);
}

/**
 * Returns the error that a response stands for.
 * @param {Response} response
 * @param {{ detail?: string, error?: { message?: string } }} body
 */
export function responseError(response, body) {
  const message = body.detail ?? body.error?.message;
  if (response.status === 401) return new Unauthorized(message ?? "Log in first.");
  if (response.status === 404) return new NotFound(message ?? "This does not exist.");
  return new Error(message ?? `The server responded with ${response.status}.`);
}

/**
 * Sends a request and returns the JSON of the response.
 * @param {string} path
 * @param {RequestInit} [options]
 */
export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Error("The server does not respond. Start it again, or wait until it is back.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw responseError(response, body);
  return body;
}

/**
 * Reads a document of the dashboard.
 * @template {keyof Documents} Name
 * @param {Name} name
 * @param {Record<string, string | number | null | undefined>} [params] null and "" are left out
 * @returns {Promise<Documents[Name]>}
 */
export function get(name, params = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(params)) {
    if (value !== undefined && value !== null && value !== "") query.set(key, String(value));
  }
  return request(`/ui/api/${name}?${query}`);
}

/**
 * Sends a change.
 * @param {string} name
 * @param {object} [body]
 */
export function post(name, body = {}) {
  const headers = { "content-type": "application/json" };
  return request(`/ui/api/${name}`, { method: "POST", headers, body: JSON.stringify(body) });
}
