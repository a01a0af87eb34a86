/* The page "Try it": forms around model.js. The rungs and GPUs stand in the page, written by tools/worklog_tables.py. */
"use strict";

(() => {
  const place = document.getElementById("explore");
  if (!place) return;
  const { machines, rungs } = JSON.parse(document.getElementById("explore-data").textContent);
  const HEAD_DIMS = [64, 96, 128, 192, 256];
  const fields = {
    rung: ["rung", [...Object.keys(rungs), "other"]],
    machine: ["GPU", Object.keys(machines)],
    dtype: ["dtype", ["bf16", "e4m3"]],
    head_dim: ["head_dim", HEAD_DIMS],
    seqlen: ["tokens", 8192, 1, 1048576],
    heads: ["heads", 16, 1, 1024],
    batch: ["batch", 2, 1, 4096],
    causal: ["causal", ["no", "yes"]],
    tile_m: ["tile_m (queries)", 128, 16, 1024],
    tile_n: ["tile_n (keys)", 128, 16, 1024],
    stages: ["stages", 2, 1, 16],
    threads: ["threads that compute", 256, 32, 1024],
    scores_bytes: ["scores in shared memory, bytes each", [0, 2, 4]],
    kv_shared: ["K and V share a buffer", ["no", "yes"]],
  };
  const OF_A_RUNG = ["dtype", "tile_m", "tile_n", "stages", "threads", "scores_bytes", "kv_shared"];
  const inputs = {}, form = document.createElement("form"), results = document.createElement("table");
  form.className = "explore-form";
  for (const [name, [label, given, least, most]] of Object.entries(fields)) {
    const input = document.createElement(Array.isArray(given) ? "select" : "input");
    if (Array.isArray(given)) given.forEach(each => input.add(new Option(each)));
    else Object.assign(input, { type: "number", value: given, min: least, max: most, step: 1 });
    input.name = name;
    const outer = document.createElement("label");
    outer.append(label, input);
    form.append(outer);
    inputs[name] = input;
  }
  place.append(form, results);
  results.id = "explore-results";

  const number = name => Math.min(+inputs[name].max || Infinity, Math.max(+inputs[name].min || 0, Math.round(+inputs[name].value) || 1));

  function preset() {
    const rung = rungs[inputs.rung.value];
    if (!rung) return;
    const sizes = rung.tiles[inputs.head_dim.value] ?? rung.tiles[128];
    const values = { ...rung, ...sizes, kv_shared: rung.kv_shared ? "yes" : "no" };
    for (const name of OF_A_RUNG) inputs[name].value = values[name];
  }

  function read() {
    const call = {
      batch: number("batch"), heads: number("heads"), seqlen: number("seqlen"), head_dim: +inputs.head_dim.value,
      dtype: inputs.dtype.value, causal: inputs.causal.value === "yes",
    };
    const tile = {
      tile_m: number("tile_m"), tile_n: number("tile_n"), stages: number("stages"), threads: number("threads"),
      scores_bytes: +inputs.scores_bytes.value, kv_shared: inputs.kv_shared.value === "yes",
    };
    return [call, tile, machines[inputs.machine.value]];
  }

  const scaled = (value, unit) => {
    const steps = ["", "k", "M", "G", "T", "P", "E"];
    let at = 0;
    while (value >= 999.5 && at < steps.length - 1) { value /= 1000; at += 1; }
    return `${+value.toPrecision(3)} ${steps[at]}${unit}`;
  };
  const percent = value => `${(100 * value).toFixed(0)} %`;
  const least = rooms => Object.keys(rooms).filter(each => rooms[each] === Math.min(...Object.values(rooms))).join(", ");
  const time = seconds => seconds >= 1e-3 ? `${+(1e3 * seconds).toPrecision(3)} ms` : `${+(1e6 * seconds).toPrecision(3)} us`;

  /* A name, a value, a share for its bar, and what is wrong with it. */
  function lines(call, tile, machine) {
    const found = tilewise.estimate(call, tile, machine), held = found.accumulators, registers = held.acc_S + held.acc_O + held.P;
    const fits = found.shared_bytes <= machine.smem_block_bytes;
    return [
      ["shared memory of a block", `${(found.shared_bytes / tilewise.KB).toFixed(0)} KB of ${machine.smem_block_bytes / tilewise.KB}`,
        found.shared_bytes / machine.smem_block_bytes, fits ? "" : "more than one block may have"],
      ["accumulators of a thread", `${registers} registers: ${held.acc_S} S, ${held.acc_O} O, ${held.P} P`, registers / tilewise.REGISTERS,
        registers > tilewise.REGISTERS ? `a thread has ${tilewise.REGISTERS}` : ""],
      ["blocks on an SM", `${found.blocks_per_sm}, limited by ${least(found.rooms)}`, null, found.blocks_per_sm ? "" : "does not fit"],
      ["occupancy", `${found.warps} warps that compute, of ${tilewise.WARPS}`, found.warps / tilewise.WARPS, ""],
      ["thread blocks", `${found.blocks.toLocaleString("en")} in ${found.waves.toLocaleString("en")} waves; the last ones' SM time used`,
        found.tail_efficiency, found.idle_sms ? `${found.idle_sms} SMs get none` : ""],
      ["a step's clocks", `products ${found.products}, softmax ${found.softmax}: tensor cores busy in turn`, found.in_step, ""],
      ["", "under each other", found.overlapped, ""],
      ["traffic, these tiles", `${scaled(found.bytes.fa2, "B")}, from L2 or HBM: ${(found.flops / found.bytes.fa2).toFixed(0)} FLOP a byte`,
        null, ""],
      ["", `FlashAttention-1 ${scaled(found.bytes.fa1, "B")}, three kernels ${scaled(found.bytes.naive, "B")}`, null, ""],
      ["operands once", `${scaled(found.bytes.once, "B")}, ${time(found.seconds.memory)}`, found.seconds.memory / found.seconds[found.bound], ""],
      ["exponentials", time(found.seconds.exponentials), found.seconds.exponentials / found.seconds[found.bound], ""],
      ["products", `${scaled(found.flops, "FLOP")}, ${time(found.seconds.compute)}`, found.seconds.compute / found.seconds[found.bound], ""],
      ["predicted bound", `${found.bound}: at best ${time(found.seconds[found.bound])}, ${scaled(found.attainable, "FLOP/s")}`, null, ""],
    ];
  }

  function show() {
    const [call, tile, machine] = read();
    if (!(call.dtype in machine.peak)) {
      results.replaceChildren();
      results.insertRow().insertCell().textContent = `${machine.name} has no tensor cores for ${call.dtype}`;
      return;
    }
    results.replaceChildren(...lines(call, tile, machine).map(([name, value, share, wrong]) => {
      const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
      head.textContent = name;
      cell.textContent = share === null ? value : `${value} (${percent(share)})`;
      if (share !== null) {
        const bar = document.createElement("span");
        bar.className = "explore-bar";
        bar.style.setProperty("--share", `${Math.min(100, 100 * share)}%`);
        cell.append(bar);
      }
      if (wrong) {
        const note = document.createElement("strong");
        note.textContent = ` ${wrong}`;
        cell.append(note);
      }
      row.append(head, cell);
      return row;
    }));
  }

  form.addEventListener("input", event => {
    if (["rung", "head_dim"].includes(event.target.name)) preset();
    else if (OF_A_RUNG.includes(event.target.name)) inputs.rung.value = "other";
    show();
  });
  form.addEventListener("submit", event => event.preventDefault());
  inputs.rung.value = "k6";
  inputs.machine.value = "H100";
  inputs.head_dim.value = 128;
  preset();
  show();
})();
