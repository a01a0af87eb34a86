/* The page "Try it": plays a trace of docs/worklog/traces, read from its picture. */
"use strict";

const traces = (() => {
  /* The panels of a picture that ladder/tracing_picture.py drew: lanes with spans [phase, start, end] in us, and the colour of each phase. */
  function parse(text) {
    const picture = new DOMParser().parseFromString(text, "image/svg+xml");
    const corners = path => [...path.getAttribute("d").matchAll(/[ML] ([-\d.]+) ([-\d.]+)/g)].map(each => [+each[1], +each[2]]);
    const fill = path => path.getAttribute("style").match(/fill: (#\w+)/)?.[1];
    const texts = group => [...group.querySelectorAll("text")].map(each => ({ words: each.textContent, x: +each.getAttribute("x"), y: +each.getAttribute("y") }));
    const [title, ...words] = texts(picture.getElementById("legend_1"));
    const patches = [...picture.querySelectorAll("#legend_1 > g[id^=patch] > path")].filter(path => corners(path).length === 4);
    const phases = {};
    for (const { words: phase, x, y } of words) {  // a word stands to the right of its patch
      const own = patches.find(path => { const [, [right, bottom]] = corners(path); return Math.abs(bottom - y) < 1 && right < x && x - right < 20; });
      if (own) phases[phase] = fill(own);
    }
    const names = Object.fromEntries(Object.entries(phases).map(([phase, colour]) => [colour, phase]));
    const panels = [...picture.querySelectorAll("g[id^=axes_]")].map(axes => {
      const ticks = texts(axes.querySelector("[id='matplotlib.axis_1'], [id='matplotlib.axis_3']")).filter(each => each.words.trim() !== "" && !isNaN(each.words));
      const first = ticks[0], last = ticks.at(-1);
      const us = x => +first.words + (x - first.x) * (last.words - first.words) / (last.x - first.x);
      const lanes = texts(axes.querySelector("[id='matplotlib.axis_2'], [id='matplotlib.axis_4']")).map(each => ({ name: each.words, y: each.y, spans: [] }));
      for (const path of axes.querySelectorAll("g[id*=PolyCollection] > path")) {
        const points = corners(path), xs = points.map(each => each[0]), ys = points.map(each => each[1]);
        const lane = lanes.find(each => each.y >= Math.min(...ys) && each.y <= Math.max(...ys));
        lane.spans.push({ phase: names[fill(path)], start: us(Math.min(...xs)), end: us(Math.max(...xs)) });
      }
      lanes.forEach(lane => lane.spans.sort((one, other) => one.start - other.start));
      const spans = lanes.flatMap(lane => lane.spans);
      return {
        name: texts(axes).at(-1).words, lanes,
        start: Math.min(...spans.map(span => span.start)), end: Math.max(...spans.map(span => span.end)),
      };
    });
    return { title: title.words, phases, panels };
  }

  /* us that each lane spends in each phase until `time`. */
  function shares(panel, time) {
    return panel.lanes.map(lane => {
      const found = {};
      for (const { phase, start, end } of lane.spans) if (start < time) found[phase] = (found[phase] ?? 0) + Math.min(end, time) - start;
      return found;
    });
  }

  return { parse, shares };
})();

(() => {
  const place = document.getElementById("trace-player");
  if (!place) return;
  const make = (tag, properties = {}, ...children) => { const made = Object.assign(document.createElement(tag), properties); made.append(...children); return made; };
  const shape = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    return made;
  };
  const WIDTH = 1000, LANE = 40, US_A_SECOND = 1;
  const rung = make("select", { ariaLabel: "rung" }), part = make("select", { ariaLabel: "part" }), speed = make("select", { ariaLabel: "speed" });
  const play = make("button", { type: "button", textContent: "Play" }), slider = make("input", { type: "range", min: 0, max: 1000, value: 0, ariaLabel: "time" });
  const title = make("p", { className: "trace-title" }), chart = shape("svg", { class: "trace-chart", role: "img", preserveAspectRatio: "none" }), now = make("table", { className: "trace-now" });
  const legend = make("p", { className: "trace-legend" });
  place.append(make("div", { className: "trace-controls" }, rung, part, speed, play, slider), title, chart, legend, now);
  place.dataset.traces.split(" ").forEach(name => rung.add(new Option(name)));
  for (const each of [1, 0.25, 0.1, 4]) speed.add(new Option(`${each} us a second`, each));
  let trace, panel, head, playing = null;

  function mark(phase) {
    const made = make("span", { className: "trace-mark" });
    made.style.background = trace.phases[phase] ?? "transparent";
    return made;
  }

  function draw() {
    panel = trace.panels[part.selectedIndex];
    chart.setAttribute("viewBox", `0 0 ${WIDTH} ${panel.lanes.length * LANE}`);
    chart.style.height = `${panel.lanes.length * 1.3}rem`;
    legend.replaceChildren(...Object.keys(trace.phases).map(phase => make("span", {}, mark(phase), phase)));
    const x = time => WIDTH * (time - panel.start) / (panel.end - panel.start);
    chart.replaceChildren(...panel.lanes.flatMap((lane, row) => lane.spans.map(({ phase, start, end }) => {
      const box = shape("rect", { x: x(start), width: Math.max(0.5, x(end) - x(start)), y: row * LANE + 3, height: LANE - 6, fill: trace.phases[phase] });
      box.append(shape("title", {}));
      box.firstChild.textContent = `${lane.name}: ${phase}, ${(end - start).toFixed(2)} us`;
      return box;
    })));
    head = shape("line", { y1: 0, y2: panel.lanes.length * LANE, class: "trace-head" });
    chart.append(head);
    at();
  }

  function at() {
    const time = panel.start + slider.value / 1000 * (panel.end - panel.start), here = slider.value / 1000 * WIDTH;
    head.setAttribute("x1", here);
    head.setAttribute("x2", here);
    const spent = traces.shares(panel, time);
    title.textContent = `${trace.title}; ${panel.name}: ${time.toFixed(2)} us`;
    now.replaceChildren(...panel.lanes.map((lane, row) => {
      const span = lane.spans.find(each => each.start <= time && time < each.end), phase = span?.phase ?? "between two phases";
      const most = Object.entries(spent[row]).sort((one, other) => other[1] - one[1]).slice(0, 3)
        .map(([name, us]) => `${name} ${(100 * us / Math.max(time - panel.start, 1e-9)).toFixed(0)} %`).join(", ");
      return make("tr", {}, make("th", { textContent: lane.name }), make("td", {}, mark(phase), phase), make("td", { textContent: most && `so far: ${most}` }));
    }));
  }

  function stop() {
    cancelAnimationFrame(playing);
    playing = null;
    play.textContent = "Play";
  }

  function run() {
    if (+slider.value >= 1000) slider.value = 0;
    const from = +slider.value, begun = performance.now(), length = panel.end - panel.start;
    play.textContent = "Pause";
    const frame = clock => {
      slider.value = Math.min(1000, from + 1000 * speed.value * US_A_SECOND * (clock - begun) / 1000 / length);
      at();
      if (+slider.value >= 1000) stop();
      else playing = requestAnimationFrame(frame);
    };
    playing = requestAnimationFrame(frame);
  }

  async function load() {
    stop();
    const answer = await fetch(`${place.dataset.folder}/${rung.value}.svg`);
    if (!answer.ok) throw new Error(`${rung.value}: ${answer.status}`);
    trace = traces.parse(await answer.text());
    part.replaceChildren(...trace.panels.map(each => new Option(each.name)));
    slider.value = 0;
    draw();
  }

  const shown = () => load().catch(error => { title.textContent = `This trace could not be read: ${error.message}`; });
  rung.addEventListener("change", shown);
  part.addEventListener("change", () => { stop(); slider.value = 0; draw(); });
  slider.addEventListener("input", () => { stop(); at(); });
  play.addEventListener("click", () => playing === null ? run() : stop());
  speed.addEventListener("change", () => { if (playing !== null) { stop(); run(); } });
  rung.value = place.dataset.first;
  shown();
})();
