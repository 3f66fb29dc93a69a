// The plan beside the form: errors, or what the job would do.
import type { FieldProblem } from "../../api/http";
import type { Plan } from "../../api/types";
import { bytes, count } from "../../format";
import { ProblemBox } from "../../ui/state";
import { LayerTable } from "./layer_table";
import type { Planned } from "./planning";

/** The categories of memory. */
const CATEGORIES: readonly [string, string][] = [
  ["parameters_bytes", "parameters"],
  ["gradients_bytes", "gradients"],
  ["optimizer_state_bytes", "optimizer"],
  ["averages_bytes", "averages"],
  ["activations_bytes", "activations"],
  ["gathered_bytes", "gathered layers"],
  ["data_bytes", "data"],
  ["checkpoint_bytes", "checkpoint"],
  ["offloaded_bytes", "offloaded to the host"],
];

export function PlanPane({ planned, jump }: { planned: Planned; jump(pointer: string): void }) {
  const { plan, problems, problem, isOld } = planned;
  return (
    <section class="card stack" aria-label="Plan">
      <div class="spread">
        <h2>Plan</h2>
        <span class="muted" role="status">{isOld ? (problems.length || problem ? "" : "updating …") : "up to date"}</span>
      </div>
      {problem && <ProblemBox problem={problem} />}
      {problems.length > 0 && <Wrong problems={problems} jump={jump} />}
      {plan && <div class={isOld ? "stack old" : "stack"}>{isOld && problems.length > 0 && <p class="muted">Previous plan:</p>}<Facts plan={plan} jump={jump} /></div>}
    </section>
  );
}

function Wrong({ problems, jump }: { problems: readonly FieldProblem[]; jump(pointer: string): void }) {
  return (
    <div class="problem" role="alert">
      <p><strong>{problems.length === 1 ? "1 error" : `${problems.length} errors`}</strong></p>
      <ul>{problems.map((one) => <Item key={one.pointer + one.detail} {...one} jump={jump} />)}</ul>
    </div>
  );
}

function Item({ pointer, detail, jump }: { pointer: string; detail: string; jump(pointer: string): void }) {
  return <li><button type="button" class="jump" onClick={() => jump(pointer)}>{pointer || "/"}</button> {detail}</li>;
}

function Facts({ plan, jump }: { plan: Plan; jump(pointer: string): void }) {
  const free = plan.devices.filter((one) => one.free).length;
  return (
    <>
      {plan.warnings.length > 0 && (
        <div class="note"><strong>Warnings</strong><ul>{plan.warnings.map((one) => <Item key={one.pointer + one.detail} {...one} jump={jump} />)}</ul></div>
      )}
      <dl class="facts">
        <dt>Parameters</dt><dd data-plan="parameters">{count(plan.parameters)}</dd>
        <dt>FLOPs per step</dt><dd data-plan="flops">{plan.flops === null ? "unknown" : count(plan.flops)}</dd>
        <dt>Steps</dt><dd data-plan="steps">{plan.num_steps === null ? "until the time limit" : count(plan.num_steps)}</dd>
        <dt>Devices</dt><dd>{plan.devices.length ? `${free} of ${plan.devices.length} eligible ${free === 1 ? "is" : "are"} free: ${names(plan)}` : "none available yet"}</dd>
        {watched(plan) > 0 && <><dt>Watched</dt><dd>{bytes(watched(plan))} per sampled step</dd></>}
      </dl>
      <h3>Memory</h3>
      <Memory memory={plan.memory} />
      {plan.parallel?.strategy === "placed" && <><h3>Devices</h3><Parts parallel={plan.parallel} /></>}
      {plan.parallel?.strategy === "pipeline" && <><h3>Stages</h3><Stages parallel={plan.parallel} /></>}
      {plan.parallel && plan.parallel.strategies.length > 0 && <><h3>Strategies</h3><Strategies parallel={plan.parallel} /></>}
      {plan.layers.length > 0 && <><h3>Layers</h3><LayerTable plan={plan} /></>}
    </>
  );
}

/** The name of a strategy; with offloading it is another one. */
function named(one: { strategy: string; cpu_offload?: boolean }): string {
  return one.cpu_offload ? `${one.strategy}, CPU offload` : one.strategy;
}

function Strategies({ parallel }: { parallel: NonNullable<Plan["parallel"]> }) {
  const fits = (one: boolean | null) => (one === null ? "unknown" : one ? "yes" : "no");
  return (
    <div class="scroll">
      <table aria-label="Strategies">
        <thead><tr><th>strategy</th><th class="number">memory per process</th><th class="number">sent per step</th><th>fits</th></tr></thead>
        <tbody>{parallel.strategies.map((one) => (
          <tr key={named(one)} data-strategy={named(one)}>
            <td>{named(one) === named(parallel) ? <strong>{named(one)}</strong> : named(one)}</td>
            <td class="number">{bytes(one.memory["total_bytes"])}</td>
            <td class="number">{bytes(one.exchanged_bytes)}</td>
            <td>{fits(one.fits)}</td>
          </tr>
        ))}</tbody>
      </table>
      {parallel.divided.length > 0 && <p>Divided layers: {parallel.divided.join(", ")}</p>}
    </div>
  );
}

/** The devices that layers are placed on. */
function Parts({ parallel }: { parallel: NonNullable<Plan["parallel"]> }) {
  return (
    <div class="scroll">
      <table aria-label="Devices of layers">
        <thead><tr><th>device</th><th class="number">layers</th><th class="number">memory</th></tr></thead>
        <tbody>{(parallel.devices ?? []).map((one) => (
          <tr key={one.device} data-device={one.device}>
            <td>{one.device}</td>
            <td class="number" title={one.layers.join(", ")}>{count(one.layers.length)}</td>
            <td class="number">{bytes(one.memory["total_bytes"])}</td>
          </tr>
        ))}</tbody>
      </table>
      <p class="muted">{bytes(parallel.exchanged_bytes)} copied between devices per step</p>
    </div>
  );
}

/** The stages of a pipeline. */
function Stages({ parallel }: { parallel: NonNullable<Plan["parallel"]> }) {
  const waiting = Math.round(100 * (parallel.bubble ?? 0));
  return (
    <div class="scroll">
      <table aria-label="Stages">
        <thead><tr><th>stage</th><th>process</th><th class="number">layers</th><th class="number">memory</th><th class="number">sent per step</th></tr></thead>
        <tbody>{(parallel.stages ?? []).map((one) => (
          <tr key={one.stage} data-stage={one.stage}>
            <td>{one.stage}</td>
            <td>{one.process}</td>
            <td class="number" title={one.layers.join(", ")}>{count(one.layers.length)}</td>
            <td class="number">{bytes(one.memory["total_bytes"])}</td>
            <td class="number">{bytes(one.sent_bytes)}</td>
          </tr>
        ))}</tbody>
      </table>
      <p class="muted">Schedule {parallel.schedule}, {count(parallel.micro_batches ?? 1)} micro-batches: a process waits {waiting}% of its time if all stages take equally long</p>
    </div>
  );
}

function names(plan: Plan): string {
  const all = plan.devices.map((one) => `${one.id} on ${one.worker}`);
  return all.slice(0, 4).join(", ") + (all.length > 4 ? " …" : "");
}

const watched = (plan: Plan) => plan.probes.reduce((sum, one) => sum + Number(one["bytes_per_step"] ?? 0), 0);

function Memory({ memory }: { memory: Record<string, number> }) {
  const most = Math.max(1, ...CATEGORIES.map(([head]) => memory[head] ?? 0));
  return (
    <div class="level">
      {CATEGORIES.filter(([head]) => memory[head]).map(([head, word]) => (
        <>
          <span>{word}</span>
          <i aria-hidden="true" style={{ width: `${(100 * memory[head]!) / most}%` }} />
          <span class="number" data-plan={head}>{bytes(memory[head])}</span>
        </>
      ))}
      <strong>total</strong><span /><strong class="number" data-plan="total_bytes">{bytes(memory["total_bytes"])}</strong>
    </div>
  );
}
