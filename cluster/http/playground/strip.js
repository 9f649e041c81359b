// The figures under the conversation: speed and first token of this page's last answer, queue and KV cache of the server.

import { status } from "./api.js";
import { $ } from "./dom.js";

const POLL_MS = 2000;

export class Strip {
  constructor() {
    this.#poll();
    document.addEventListener("visibilitychange", () => !document.hidden && this.#poll());
  }

  begin() {
    this.begun = performance.now();
    this.first = null;
    this.count = 0;
    for (const id of ["speed", "ttft"]) $(id).textContent = "–";
  }

  /** Counts tokens that have just arrived. */
  add(count) {
    if (!count) return;
    const now = performance.now();
    if (this.first === null) {
      this.first = now;
      $("ttft").textContent = duration(now - this.begun);
    }
    this.count += count;
    const rate = this.#rate(now);
    if (rate) $("speed").textContent = rate;
  }

  /** Returns a sentence about the answer. `usage` is the server's count, or null if the stream was cut. */
  end(usage) {
    this.#poll();
    if (this.first === null) return "";
    this.count = usage?.completion_tokens ?? this.count;
    const rate = this.#rate(performance.now());
    if (rate) $("speed").textContent = rate;
    const parts = [`${this.count} ${this.count === 1 ? "token" : "tokens"}`, rate && `${rate} tokens/s`];
    parts.push(`first after ${duration(this.first - this.begun)}`);
    const accepted = usage?.completion_tokens_details?.accepted_prediction_tokens;
    if (accepted) parts.push(`${accepted} from drafts`);
    return parts.filter(Boolean).join(" · ");
  }

  #rate(now) {
    const seconds = (now - this.first) / 1000;
    return this.count > 1 && seconds > 0.005 ? Math.round(this.count / seconds).toLocaleString("en") : "";
  }

  async #poll() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      const { engines } = await status();
      const sum = (name) => engines.reduce((total, engine) => total + engine[name], 0);
      const usage = engines.length ? sum("kv_usage") / engines.length : 0;
      $("running").textContent = sum("num_running");
      $("waiting").textContent = sum("num_waiting");
      $("kv").textContent = `${(100 * usage).toFixed(usage && usage < 0.1 ? 1 : 0)}%`;
      $("kv_meter").style.setProperty("--share", usage);
    } catch (error) {
      const isRefused = error.status === 401 || error.status === 403;
      for (const id of ["running", "waiting", "kv"]) $(id).textContent = isRefused ? "needs a key" : "–";
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#poll(), POLL_MS);
  }
}

function duration(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}
