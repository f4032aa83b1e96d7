// Types of the page that need a browser. Other shared types are in model/types.d.ts, and the documents of
// the server in documents.d.ts.

import type { ChangesDocument } from "./documents.js";
import type { Router } from "./router.js";
import type { Store } from "./store.js";

/** What a view may use. Views import neither the store nor the router: `app.js` passes both. */
export interface ViewContext {
  store: Store;
  router: Router;
  /** Id of the run of the route. */
  id: string | null;
  /** Shows an error in `root`, or the login form if the session has ended. */
  fail: (error: unknown, root?: HTMLElement) => void;
}

/** An open view. `app.js` calls the methods; a view calls none of another view. */
export interface View {
  /** Shows the state that the parameters of the address describe. */
  update?: (params: URLSearchParams) => void;
  /** The store has new runs or samples. */
  changes?: (changes: ChangesDocument) => void;
  /** The store has new figures of the server. */
  server?: () => void;
  /** Events may have been missed: the view reads again what it shows. */
  reconnected?: () => void;
  /** The theme has changed: canvases are drawn again. */
  redraw?: () => void;
  key?: (event: KeyboardEvent) => void;
  close?: () => void;
}

/** Opens a view in an empty element. */
export type OpenView = (root: HTMLElement, context: ViewContext) => View;

/** A part of the run's page: the content of one tab. */
export interface Panel {
  element: HTMLElement;
  update?: (params: URLSearchParams) => void;
  load?: () => Promise<void>;
  /** Reads what is new. Errors are not reported: the next change reads again. */
  refresh?: () => void;
  redraw?: () => void;
  resetZoom?: () => void;
  close?: () => void;
}

export type Child = Node | string | number | boolean | null | undefined | Child[];

/** Attributes and listeners of an element. Null, undefined and false leave the attribute out. */
export type Attributes = Record<string, string | number | boolean | null | undefined | ((event: any) => void)>;
