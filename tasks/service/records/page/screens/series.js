// A run's recorded rows, live: keyed by step and rank; after a restart, repeated steps replace earlier rows.

import { get, query } from "../api.js";

export class Series {
  constructor(name) {
    this.name = name;
    this.clear();
  }

  clear() {
    this.steps = new Map(); // step -> Map of rank -> row
    this.newest = [];
    this.epochs = [];
    this.splits = [];
    this.stride = 0;
    this.next = 0;
    this.last = -1;
    this.progress = null; // of a training that goes on
  }

  async read(signal) {
    const found = await get(`runs/${this.name}/metrics?${query({ from_step: this.next })}`, signal);
    const last = Math.max(-1, ...found.newest.map((row) => row.step));
    if (this.next > 0 && (found.stride !== this.stride || last < this.last)) {
      this.clear(); // rows were thinned further, or training returned to a checkpoint
      return this.read(signal);
    }
    for (const row of found.rows) {
      if (!this.steps.has(row.step)) this.steps.set(row.step, new Map());
      this.steps.get(row.step).set(row.rank, row);
    }
    Object.assign(this, { newest: found.newest, epochs: found.epochs, splits: found.splits, stride: found.stride, next: found.next_step, last, progress: found.progress });
    return this;
  }

  // Columns for charts: x, then one column for each rank.
  byRank(field) {
    const steps = this.sorted();
    const ranks = this.ranks();
    return [steps, ...ranks.map((rank) => steps.map((step) => this.steps.get(step).get(rank)?.[field] ?? null))];
  }

  // As `byRank`, without the last step of each epoch, which has only the rest of the rows.
  wholeBatches() {
    const steps = this.sorted();
    const rows = steps.map((step) => [...this.steps.get(step).values()]);
    const size = (index) => rows[index].reduce((sum, row) => sum + row.batch_size, 0);
    const same = (index, other) => rows[other] !== undefined && rows[index][0].epoch === rows[other][0].epoch;
    const rest = steps.map((_, index) => same(index, index - 1) && !same(index, index + 1) && size(index) < size(index - 1));
    return this.byRank("batch_size").map((column) => column.filter((_, index) => !rest[index]));
  }

  // x, and one column with `value` of each step's rows.
  joint(value) {
    const steps = this.sorted();
    return [steps, steps.map((step) => value([...this.steps.get(step).values()]))];
  }

  ranks() {
    return [...new Set([...this.steps.values()].flatMap((rows) => [...rows.keys()]))].sort((one, other) => one - other);
  }

  // The devices of a rank's rows: a new plan may change the device.
  devices(rank) {
    const names = [...this.steps.entries()].sort(([one], [other]) => one - other).map(([, rows]) => rows.get(rank)?.device);
    return [...new Set(names.filter((name) => name))];
  }

  sorted() {
    return [...this.steps.keys()].sort((one, other) => one - other);
  }
}

// Samples per second of a step: those of all ranks, divided by the slowest rank's step time.
export function throughput(rows) {
  const taken = Math.max(...rows.map((row) => row.step_time_s));
  const samples = rows.reduce((sum, row) => sum + row.batch_size, 0);
  return taken > 0 ? samples / taken : null;
}

// Two columns over one x: `[x, one, other]`, null where there is none.
export function merged(one, other) {
  const first = new Map(one[0].map((x, index) => [x, one[1][index]]));
  const second = new Map(other[0].map((x, index) => [x, other[1][index]]));
  const x = [...new Set([...first.keys(), ...second.keys()])].sort((left, right) => left - right);
  return [x, x.map((at) => first.get(at) ?? null), x.map((at) => second.get(at) ?? null)];
}
