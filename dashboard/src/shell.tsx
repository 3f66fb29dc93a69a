// The frame around every view: navigation, theme, and the connection state.
import { ErrorBoundary, LocationProvider, Route, Router, useLocation } from "preact-iso";
import { useEffect, useRef } from "preact/hooks";

import { connection } from "./api/http";
import { useLive } from "./api/live";
import { choice, choose, type Choice } from "./theme";
import { part } from "./ui/part";
import { Empty } from "./ui/state";
import { Toasts } from "./ui/toast";
import { Unlock } from "./unlock";

const Jobs = part(() => import("./views/jobs/list"));
const JobView = part(() => import("./views/job/view"));
const Layer = part(() => import("./views/inside/layer"));
const Compare = part(() => import("./views/compare/view"));
const Datasets = part(() => import("./views/datasets/list"));
const Dataset = part(() => import("./views/datasets/view"));
const Models = part(() => import("./views/models/list"));
const ModelView = part(() => import("./views/models/view"));
const Devices = part(() => import("./views/devices/view"));
const Submit = part(() => import("./views/submit/view"));
const Settings = part(() => import("./views/settings/view"));

const LINKS: readonly [string, string][] = [
  ["/jobs", "Jobs"],
  ["/compare", "Compare"],
  ["/datasets", "Datasets"],
  ["/models", "Models"],
  ["/devices", "Devices"],
  ["/settings", "Settings"],
];

const ASK_EVERY_S = 10;

export function Shell() {
  useLive("", ASK_EVERY_S); // so that every view notices when the session ends or the service is unavailable
  return (
    <LocationProvider>
      <a class="skip" href="#main">Skip to content</a>
      <Top />
      {connection.value === "lost" && (
        <div class="bar" role="status">The service is unavailable. Values may be outdated. Retrying …</div>
      )}
      <main id="main" tabIndex={-1}>{connection.value === "locked" ? <Unlock /> : <Views />}</main>
      <Toasts />
    </LocationProvider>
  );
}

/** A followed link disappears with its view: move the focus to the new view, not to the top of the page. */
function useRestoredFocus(): void {
  const { path } = useLocation();
  const before = useRef(path);
  useEffect(() => {
    if (before.current === path) return;
    before.current = path;
    const from = document.activeElement;
    let left = 50; // a lazy view loads later
    const look = () => {
      const lost = document.activeElement === document.body;
      if (lost) document.getElementById("main")?.focus({ preventScroll: true });
      if (lost || document.activeElement !== from || !--left) clearInterval(timer);
    };
    const timer = setInterval(look, 100);
    return () => clearInterval(timer);
  }, [path]);
}

function Views() {
  useRestoredFocus();
  return (
    <ErrorBoundary onError={(error) => console.error(error)}>
      <Router>
        <Route path="/" component={Jobs} />
        <Route path="/jobs" component={Jobs} />
        <Route path="/jobs/:id" component={JobView} />
        <Route path="/jobs/:id/layers/:layer" component={Layer} />
        <Route path="/jobs/:id/:tab" component={JobView} />
        <Route path="/compare" component={Compare} />
        <Route path="/datasets" component={Datasets} />
        <Route path="/datasets/:id" component={Dataset} />
        <Route path="/models" component={Models} />
        <Route path="/models/:name" component={ModelView} />
        <Route path="/devices" component={Devices} />
        <Route path="/submit" component={Submit} />
        <Route path="/settings" component={Settings} />
        <Route default component={NotFound} />
      </Router>
    </ErrorBoundary>
  );
}

function NotFound() {
  return <Empty><p>This page does not exist.</p><a class="button" href="/jobs">Back to jobs</a></Empty>;
}

function Top() {
  const { path } = useLocation();
  const here = (to: string) => path === to || path.startsWith(`${to}/`) || (to === "/jobs" && path === "/");
  return (
    <header class="top">
      <a class="brand" href="/jobs">
        <svg viewBox="0 0 16 16" aria-hidden="true" fill="none" stroke="currentColor" stroke-width="1.3"><path d="M8 1 1 6v9h14V6zM1 6h14M8 1v14M1 10.5h14" /></svg>
        Glasshouse
      </a>
      <nav aria-label="Views">
        {LINKS.map(([to, name]) => <a key={to} href={to} aria-current={here(to) ? "page" : undefined}>{name}</a>)}
      </nav>
      <a class="button primary" href="/submit">New job</a>
      <select aria-label="Theme" value={choice.value} onChange={(event) => choose(event.currentTarget.value as Choice)}>
        <option value="system">System</option>
        <option value="light">Light</option>
        <option value="dark">Dark</option>
      </select>
    </header>
  );
}
