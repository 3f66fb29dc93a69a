// Shown without a session. The API key is sent in the header of one request and not stored.
import { useState } from "preact/hooks";

import { get } from "./api/http";
import type { Problem } from "./api/http";
import { ProblemBox } from "./ui/state";

export function Unlock() {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState<Problem | null>(null);
  const open = async (event: Event) => {
    event.preventDefault();
    try {
      const headers = { Authorization: `Bearer ${key.trim()}` };
      const ticket = await get<{ url: string }>("tickets", { method: "POST", headers });
      location.assign(ticket.url);
    } catch (error) {
      setProblem(error as Problem);
    }
  };
  return (
    <div class="card" style={{ maxWidth: "36rem", margin: "3rem auto" }}>
      <h1>Open Glasshouse</h1>
      <p class="muted" style={{ marginTop: ".6rem" }}>
        On the machine that runs the service, <code>glasshouse open</code> opens this page with a one-time link. Or enter an API key:
      </p>
      <form class="row" onSubmit={open}>
        <label class="field" style={{ flex: 1 }}>
          <span>API key</span>
          <input type="password" autocomplete="off" value={key} onInput={(event) => setKey(event.currentTarget.value)} required />
        </label>
        <button class="primary" style={{ alignSelf: "end" }}>Open</button>
      </form>
      {problem && <div style={{ marginTop: "1rem" }}><ProblemBox problem={problem} /></div>}
    </div>
  );
}
