// The cockpit's page: one ES module, no library. Python sends the controls' values and the answer as
// traits; a change goes back as a message, one at a time, so that a slider never queues.
const esc = text => String(text ?? '').replace(/[&<>"]/g, c => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;'})[c]);
const show = value => typeof value !== 'number' ? String(value ?? '')
  : value >= 1000 ? Math.round(value).toLocaleString('en') : String(+value.toPrecision(3));
const ICONS = {good: 'M2.5 6.4l2.4 2.4 4.6-5', warn: 'M6 2.2v4.4M6 9.6v.1', bad: 'M3 3l6 6M9 3l-6 6', calm: 'M6 1.5a4.5 4.5 0 1 1-4.5 4.5'};
const ANSWER_LIMIT_MS = 20000;
// name: [label, lowest, highest, unit, linear?]
const SLIDERS = {
  rate: ['Requests/s', 0.01, 1000, ''],
  concurrency: ['Requests at once', 1, 10000, ''], prompt: ['Prompt', 10, 1e5, ''], output: ['Answer', 10, 1e4, ''],
  reuse: ['Cached', 0, 95, '%', true], headroom: ['Keep free', 0, 60, '%', true],
  confidence: ['Probability', 50, 99, '%', true]
};
const LOADS = {rate: 'Requests/s', concurrency: 'Closed loop', requests: 'Batch'};
const NEW_LIMITS_MS = {ttft: 1000, tpot: 40, itl: 50, e2e: 30000};
const TIERS = {on_demand: 'On demand', reserved: 'Reserved', spot: 'Spot'};
const LOGO = '<svg viewBox="0 0 20 20" aria-hidden="true"><rect x="1" y="1" width="18" height="18" rx="5" fill="var(--blue)"/><path d="M5 14.5h10M6.5 14V10M10 14V7M13.5 14V11" stroke="var(--on)" stroke-width="1.8" stroke-linecap="round"/><path d="M5 4.6h10" stroke="var(--on)" stroke-width="1.4" stroke-dasharray="2 2" stroke-linecap="round"/></svg>';

const isDark = () => {
  const {dataset, classList} = document.body;
  if ('jpThemeLight' in dataset) return dataset.jpThemeLight === 'false';
  return classList.contains('theme-dark') || matchMedia('(prefers-color-scheme: dark)').matches;
};
const make = html => {
  const holder = document.createElement('template');
  holder.innerHTML = html.trim();
  return holder.content.firstElementChild;
};
const option = (value, text, chosen) => `<option value="${esc(value)}" ${value === chosen ? 'selected' : ''}>${esc(text)}</option>`;

function render({model, el}) {
  el.classList.add('headroom', 'hr-app');
  el.dataset.lmSuppressShortcuts = 'true'; // else "b" on a slider inserts a cell
  const get = name => model.get(name) || {};
  const cleanups = [];
  const on = (name, draw) => {
    const guarded = () => { // an exception would end all later updates
      try { draw(); } catch (error) { console.error('headroom', error); }
    };
    model.on(`change:${name}`, guarded);
    cleanups.push(() => model.off(`change:${name}`, guarded));
    return guarded;
  };

  // ---- messages: one at a time; what changes meanwhile is sent together
  let outdated = false;
  const outdate = is => { outdated = is; card(); };
  let ticket = 0, waiting = null, pending = {}, flying = {};
  const now = name => pending[name] ?? flying[name] ?? get('controls')[name];
  const send = content => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { waiting = null; lost(); }, ANSWER_LIMIT_MS);
    model.send({...content, ticket: ++ticket});
    el.classList.add('hr-asking');
    if (content.do !== 'save' && content.do !== 'report') outdate(true);
  };
  const flush = () => {
    if (waiting || !Object.keys(pending).length) return;
    const changes = pending;
    pending = {};
    flying = changes;
    send({do: 'set', changes});
  };
  let debounce;
  const ask = (changes, delay = 0) => {
    Object.assign(pending, changes);
    clearTimeout(debounce);
    debounce = setTimeout(flush, delay);
  };
  const lost = () => {
    $('.hr-lost').hidden = false;
  };
  on('handled', () => {
    if (model.get('handled') < ticket) return;
    clearTimeout(waiting);
    waiting = null;
    flying = {};
    el.classList.remove('hr-asking');
    outdate(false);
    $('.hr-lost').hidden = true;
    flush();
  });

  el.innerHTML = `<main class="panes">
    <section class="q" aria-label="Question">
      <div class="brand">${LOGO}<b>Headroom</b><select class="field start" aria-label="Start from"></select></div>
      <div data-field="start"></div>
      <h3>Model</h3>
      <div data-field="model"><input class="field" aria-label="Model" data-name="model" list="hr-models" title="A name on the Hub, or the path of a config.json" spellcheck="false"><datalist id="hr-models"></datalist></div>
      <h3>Traffic <small class="rate"></small></h3>
      <div class="seg loads" role="group" aria-label="Load"></div>
      <div class="load-rows" hidden></div>
      <label class="check max"><input type="checkbox" data-name="find_max"> Find the most that meets the targets</label>
      <div class="lengths"></div>
      <h3>Latency targets <select class="link add" aria-label="Add a target"></select></h3>
      <div class="limits"></div><div class="spare-rows"></div>
      <h3>GPUs and price <small>at most <input class="in small" aria-label="GPUs at most" data-name="at_most"></small></h3>
      <div data-field="gpus"><div class="pick gpus" role="group" aria-label="GPUs"></div></div>
      <div class="pair"><select class="field" aria-label="Price tier" data-name="tier"></select><select class="field" aria-label="Provider" data-name="seller"></select></div>
      <div data-field="tier"></div>
      <div class="row wide" data-field="own_price"><label>Own price</label><input class="in" aria-label="Own price, $ per GPU-hour" data-name="own_price" placeholder="$ per GPU-hour"></div>
      <div class="row wide" data-field="budget"><label>Budget</label><input class="in" aria-label="Budget, $ a month" data-name="budget" placeholder="$ a month"></div>
      <div class="row wide"><label>Spare replicas</label><div class="seg spares" role="group" aria-label="Spare replicas"></div></div>
      <details class="adv"><summary>More <small></small></summary><div class="more"></div></details>
    </section>
    <section class="a" aria-label="Answer">
      <div class="card note hr-lost" hidden>The kernel does not answer. Choose <b>Run, Restart Kernel and Run All Cells</b>.</div>
      <div class="card verdict" role="status" aria-live="polite"></div>
      <form class="card pad save" hidden><label>Title <input class="field" name="title"></label><label>File <input class="field" name="file" value="my-question"></label><button class="btn pri">Save as scenario</button><div data-field="save"></div></form>
      <div class="card pad said" role="status" hidden></div>
      <div class="tiles"></div>
      <div class="two"><div class="card pad targets"></div><div class="card pad latency"></div></div>
      <div class="two stacks"><div><div class="card pad"><div class="options"></div><div class="gpus-too"></div></div><div class="card pad changes"></div></div><div><div class="card pad cost"></div><div class="card pad memory"></div><div class="card pad command"></div></div></div>
      <div class="card pad day" hidden></div>
      <details class="card pad why"><summary>Reasons, prices and assumptions</summary><div></div></details>
    </section></main>`;
  const $ = selector => el.querySelector(selector);
  const $$ = selector => [...el.querySelectorAll(selector)];
  const redraw = (place, html) => { // the focus stays where it was
    const key = place.contains(document.activeElement) && document.activeElement.dataset.key;
    place.innerHTML = html;
    if (key) place.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
  };

  // ---- the question
  const rows = {};
  const isHeld = (name, place) => // what the reader is changing, or has typed wrongly
    get('answer').error?.field === name || (place.contains(document.activeElement) && (name in pending || waiting));
  function slider(name) {
    const [label, low, high, unit, linear] = SLIDERS[name];
    const row = make(`<div class="row" data-field="${name}"><label>${label}</label><input type="range" min="0" max="1000" aria-label="${label}"><input class="in" aria-label="${label}, typed" spellcheck="false"></div>`);
    const [, range, typed] = row.children;
    const place = value => Math.round(1000 * (linear ? (value - low) / (high - low) : Math.log(Math.max(value, low) / low) / Math.log(high / low)));
    const value = at => linear ? Math.round(low + (high - low) * at / 1000) : +(low * (high / low) ** (at / 1000)).toPrecision(2);
    const put = v => {
      range.value = place(v);
      range.style.setProperty('--p', `${range.value / 10}%`);
      range.setAttribute('aria-valuetext', show(v) + unit);
      typed.value = show(v) + unit;
    };
    range.addEventListener('input', () => { const v = value(+range.value); put(v); ask({[name]: v}, 40); });
    range.addEventListener('keydown', event => { // a step of the keyboard is one of the two digits that are shown
      const step = {ArrowUp: 8, ArrowRight: 8, ArrowDown: -8, ArrowLeft: -8, PageUp: 60, PageDown: -60}[event.key];
      if (!step) return;
      event.preventDefault();
      range.value = +range.value + step;
      range.dispatchEvent(new Event('input'));
    });
    typed.addEventListener('change', () => ask({[name]: typed.value}));
    rows[name] = () => { if (!isHeld(name, row)) put(+get('controls')[name]); };
    return row;
  }
  const sliders = Object.fromEntries(Object.keys(SLIDERS).map(name => [name, slider(name)]));
  const field = (label, name, attributes = '') => make(`<div class="row wide" data-field="${name}"><label>${label}</label><input class="in" aria-label="${label}" data-name="${name}" ${attributes}></div>`);
  $('.load-rows').append(sliders.rate, sliders.concurrency,
    field('Requests', 'requests'), field('Within hours', 'within_hours'));
  $('.lengths').append(sliders.prompt, sliders.output, sliders.reuse);
  $('.spare-rows').append(sliders.headroom, sliders.confidence);
  const choice = (label, name) => make(`<div class="row wide" data-field="${name}"><label>${label}</label><select class="field" aria-label="${label}" data-name="${name}"></select></div>`);
  const chips = (label, name) => make(`<div class="row wide chips" data-field="${name}"><label>${label}</label><div class="pick" role="group" aria-label="${label}" data-chips="${name}"></div></div>`);
  $('.more').append(choice('Engine', 'engine'), choice('Version', 'engine_version'), chips('Weights', 'quantization'), chips('KV cache', 'kv_cache_dtype'),
    make('<label class="check spec"><input type="checkbox" data-name="speculation"> Allow speculative decoding</label>'),
    field('Day', 'day', 'list="hr-days" placeholder="a profile, a trace file, 24 figures"'), make('<datalist id="hr-days"></datalist>'),
    field('LoRA adapters', 'adapters'), choice('Largest rank', 'rank'), field('Skew (Zipf)', 'zipf'));

  const choices = () => {
    const c = get('choices');
    $('.start').innerHTML = (c.scenarios || []).map(name => option(name, name)).join('');
    $('#hr-models').innerHTML = (c.models || []).map(name => option(name, '')).join('');
    $('#hr-days').innerHTML = (c.days || []).map(name => option(name, '')).join('');
  };
  const controls = () => {
    const c = get('controls'), all = get('choices');
    if (!c.model) return;
    $('.load-rows').hidden = false;
    Object.values(rows).forEach(put => put());
    for (const input of $$('[data-name]')) {
      const name = input.dataset.name;
      if (isHeld(name, input) || document.activeElement === input) continue;
      if (input.type === 'checkbox') input.checked = c[name];
      else if (input.tagName === 'INPUT') input.value = name === 'adapters' && !c[name] ? '' : show(c[name]);
    }
    $('.start').value = all.scenarios.find(name => name === c.name || name === `${c.name}.yaml`) || c.name;
    $('.loads').innerHTML = Object.entries(LOADS).map(([kind, text]) => `<button data-key="load-${kind}" aria-pressed="${c.load === kind}">${text}</button>`).join('');
    for (const name of ['rate', 'concurrency']) sliders[name].hidden = c.load !== name || c.find_max;
    for (const name of ['requests', 'within_hours']) $(`[data-field="${name}"]`).hidden = c.load !== 'requests';
    $('.max').hidden = !['rate', 'concurrency'].includes(c.load);
    $('.rate').textContent = c.find_max ? 'the most is the question' : c.load === 'rate' ? 'in the busiest hour' : c.load === 'trace' ? 'as recorded' : '';
    $('.add').innerHTML = '<option value="">+ add</option>' + all.statistics.flatMap(p => Object.keys(all.metrics).map(m => `${m} ${p}`))
      .filter(key => !c.targets.includes(key)).sort().map(key => { const [m, p] = key.split(' '); return option(key, `${all.metrics[m]}, ${p}`); }).join('');
    if (!$('.limits').contains(document.activeElement) || !get('answer').error) redraw($('.limits'), c.targets.map(key => {
      const [metric, statistic] = key.split(' ');
      return `<div data-field="${key}"><div class="limit"><span>${esc(all.metrics[metric])}</span><span class="pc">${statistic}</span><span>≤</span><input class="in" data-key="t-${key}" data-target="${key}" aria-label="${statistic} ${metric.toUpperCase()} limit" value="${isNaN(c[key]) ? esc(c[key]) : `${show(+c[key])} ms`}" title="A limit, or best: the shortest that is met"><button class="x" data-key="x-${key}" data-remove="${key}" aria-label="Remove ${statistic} ${metric.toUpperCase()}">×</button></div></div>`;
    }).join(''));
    const offered = [...new Set([...all.offered_gpus, ...c.gpus])];
    redraw($('.gpus'), offered.map(name => `<button data-key="g-${esc(name)}" data-gpu="${esc(name)}" aria-pressed="${c.gpus.includes(name)}">${esc(name.replace(/-SXM/, ''))}</button>`).join('')
      + `<input class="in other" data-key="g-other" aria-label="Another GPU" list="hr-gpus" placeholder="${all.gpus.length - offered.length} more"><datalist id="hr-gpus">${all.gpus.map(name => option(name, '')).join('')}</datalist>`);
    const select = (name, html) => { const place = $(`select[data-name="${name}"]`); if (document.activeElement !== place || place.value !== String(c[name])) place.innerHTML = html; };
    select('tier', Object.entries(TIERS).map(([value, text]) => option(value, text, c.tier)).join(''));
    select('seller', option('', `Median of ${c.sellers.length}`, c.seller) + [...new Set([...c.sellers, ...(c.seller ? [c.seller] : [])])].map(name => option(name, name, c.seller)).join(''));
    select('engine', Object.keys(all.engines).map(name => option(name, name, c.engine)).join(''));
    select('engine_version', all.engines[c.engine].map(version => option(version, version, c.engine_version)).join(''));
    select('rank', all.ranks.map(rank => option(rank, rank, c.rank)).join(''));
    for (const name of ['rank', 'zipf']) $(`[data-field="${name}"]`).hidden = !c.adapters;
    $('[data-field="day"]').hidden = !['rate', 'trace'].includes(c.load);
    $('.spec').hidden = !c.can_speculate;
    redraw($('.spares'), [0, 1, 2].map(n => `<button data-key="s-${n}" data-spare="${n}" aria-pressed="${c.spare_replicas === n}">${n}</button>`).join(''));
    for (const [name, known] of [['quantization', all.formats], ['kv_cache_dtype', all.kv_formats]])
      redraw($(`[data-chips="${name}"]`), known.map(value => `<button data-key="${name}-${value}" data-chip="${name}" data-value="${value}" aria-pressed="${c[name].includes(value)}">${value}</button>`).join(''));
    $('.adv small').textContent = [`${c.engine} ${c.engine_version}`, c.adapters ? `${c.adapters} adapters` : '', c.day ? 'a day' : ''].filter(Boolean).join(' · ');
    if (!$('.save').contains(document.activeElement)) $('.save').elements.title.value = c.question;
  };
  const toggle = (list, value) => list.includes(value) ? list.filter(each => each !== value) : [...list, value];
  el.addEventListener('click', event => {
    const button = event.target.closest('button, [data-key]');
    if (!button || !el.contains(button)) return;
    const key = button.dataset.key || '', {gpu, remove, spare, chip, value, changes, act, target} = button.dataset;
    if (key.startsWith('load-')) ask({load: key.slice(5)});
    else if (remove) ask({[remove]: ''});
    else if (spare) ask({spare_replicas: +spare});
    else if (gpu) { const gpus = toggle(now('gpus'), gpu); if (gpus.length) ask({gpus}); }
    else if (chip) ask({[chip]: toggle(now(chip), value)});
    else if (changes) ask(JSON.parse(changes));
    else if (target && target !== 'load' && button.tagName === 'BUTTON') { model.set('view', {...get('view'), target}); model.save_changes(); }
    else if (act === 'save') { $('.save').hidden = !$('.save').hidden; if (!$('.save').hidden) $('.save').elements.file.focus(); }
    else if (act === 'copy') copy(button);
    else if (act === 'report') send({do: 'report', name: $('.save').elements.file.value});
    else if (act) send({do: act});
    if ((gpu || chip) && now(chip || 'gpus').length) button.setAttribute('aria-pressed', now(chip || 'gpus').includes(gpu || value));
  });
  el.addEventListener('change', event => {
    const input = event.target, {name, target} = input.dataset;
    if (input.matches('.start')) send({do: 'load', name: input.value});
    else if (input.matches('.add')) { if (input.value) ask({[input.value]: NEW_LIMITS_MS[input.value.split(' ')[0]]}); input.value = ''; }
    else if (input.matches('.other')) { if (input.value) ask({gpus: [...now('gpus'), input.value]}); }
    else if (target) ask({[target]: input.value});
    else if (name === 'rank') ask({rank: +input.value});
    else if (name) ask({[name]: input.type === 'checkbox' ? input.checked : input.value});
  });
  el.addEventListener('keydown', event => {
    if (event.key === 'Enter' && event.target.matches('input:not([type=range])') && !event.target.form) event.target.blur();
    if (event.key === 'Escape' && event.target.form) $('.save').hidden = true;
    if (event.key === 'z' && (event.ctrlKey || event.metaKey) && !event.target.matches('input:not([type=range])')) { event.preventDefault(); send({do: 'undo'}); }
  });
  $('.save').addEventListener('submit', event => {
    event.preventDefault();
    const {title, file} = $('.save').elements;
    send({do: 'save', name: file.value, title: title.value});
  });
  const copy = async button => {
    const pre = button.closest('.command').querySelector('pre');
    try { await navigator.clipboard.writeText(pre.textContent); button.textContent = 'Copied'; }
    catch { getSelection().selectAllChildren(pre); button.textContent = 'Selected'; } // plain http from another host
    setTimeout(() => { button.textContent = 'Copy'; }, 2000);
  };

  // ---- the answer
  const dot = tone => `<i class="dot ${tone === 'warn' ? 'half' : tone === 'bad' ? 'hollow' : ''}" aria-hidden="true"></i>`;
  const odds = (tone, text) => `<span class="odds v-${tone}">${dot(tone)}<b>${esc(text)}</b></span>`;
  const dots = share => `<div class="dots" aria-hidden="true">${Array.from({length: 40}, (_, k) => `<i class="${k < Math.round(40 * share) ? '' : 'no'}"></i>`).join('')}</div>`;
  const card = () => {
    const a = get('answer'), computing = a.state === 'computing';
    const failed = a.state === 'failed', stale = outdated || a.error?.stale, tone = failed ? 'calm' : a.tone;
    const place = $('.verdict');
    place.className = `card verdict v-${tone} ${a.state !== 'final' ? 'open' : ''} ${stale ? 'stale' : ''}`;
    const meta = failed ? a.failure : stale ? 'answer to the question before' : a.meta;
    const buttons = `<div class="acts">${get('controls').can_undo ? '<button class="btn" data-key="undo" data-act="undo" title="Ctrl-Z">Back</button>' : ''}${failed ? '<button class="btn pri" data-key="retry" data-act="retry">Try again</button>' : ''}
      <button class="btn" data-key="save" data-act="save">Save</button><button class="btn ${failed ? '' : 'pri'}" data-key="report" data-act="report">Report</button></div>`;
    redraw(place, `<div><div class="pillrow"><span class="pill"><svg viewBox="0 0 12 12" aria-hidden="true"><path d="${ICONS[tone]}"/></svg>${esc(a.word)}</span><span class="meta">${esc(meta)}</span></div>
      ${computing ? `<i class="bone w40"></i><i class="bone w80"></i><i class="bone w60"></i>` : `<h2 class="head">${esc(a.head)} <span>${esc(a.sub)}</span></h2><p class="say">${(a.say || []).map((line, k) => k ? esc(line) : `<b>${esc(line)}</b>`).join(' ')}</p>`}</div>
      <div class="price">${computing ? '<i class="bone"></i>' : `${a.month ? `<div class="big">${esc(a.month)} <small>${esc(a.period)}</small></div>` : ''}<div class="sub">${esc(a.hour)}</div>`}${buttons}</div>`);
    el.classList.toggle('hr-stale', Boolean(stale));
  };
  const tiles = () => redraw($('.tiles'), (get('answer').tiles || []).map(t =>
    `<div class="card tile" title="${esc(t.hint || t.note)}"><div class="k">${esc(t.name)}</div><div class="n">${esc(t.value)} <small>${esc(t.unit)}</small></div>${t.share === undefined ? `<div class="s">${esc(t.note)}</div>` : dots(t.share)}</div>`).join('')
    || (get('answer').state === 'computing' ? '<div class="card tile"><i class="bone"></i></div>'.repeat(4) : ''));
  const title = (text, small = '') => `<div class="t">${esc(text)} <small>${esc(small)}</small></div>`;
  const targets = () => {
    const list = get('answer').targets || [], shown = get('charts').latency?.key, about = get('answer').state === 'final' ? '' : '\u2248 ';
    redraw($('.targets'), title('Latency targets', 'line: limit') + list.map(t =>
      `<button class="slo v-${t.tone}" data-key="slo-${t.key}" data-target="${t.key}" aria-pressed="${t.key === shown}"><span class="l"><b>${esc(t.name)}</b><span>${esc(t.short)}</span><span class="r"><b>${about}${esc(t.value)}</b> ${t.range ? `<small>(${esc(t.range)})</small>` : ''} of ${esc(t.limit)}</span><span class="vd">${esc(t.status)}</span></span>
      <span class="track"><i class="iv" style="left:${t.lo}%;width:${t.inside}%"></i>${t.over > 0 ? `<i class="ov" style="left:${t.over_from}%;width:${t.over}%"></i>` : ''}<i class="lim" style="left:${t.at}%"></i><i class="mid" style="left:${t.mid}%"></i></span></button>`).join('')
      + (list.length ? '<div class="key"><span><i class="kd"></i>expected</span><span><i class="kb"></i>range up to the asked probability</span><span class="br">in brackets: 4 of 5 cases</span></div>' : `<p class="none">${get('answer').state === 'final' ? 'No latency is stated.' : 'Follow with the answer.'}</p>`));
  };
  const chart = (place, drawn, name, empty) => redraw($(place), drawn ? `${title(drawn.title)}<div class="svg" role="img" aria-label="${esc(`${drawn.title}. ${drawn.note}`)}">${drawn.svg}</div><p class="cap">${esc(drawn.note)}</p>` : title(name) + `<p class="none">${esc(empty)}</p>`);
  const charts = () => {
    const c = get('charts'), state = get('answer').state, tone = get('answer').tone;
    chart('.latency', c.latency, 'Latency against load', state === 'computing' ? 'Follows with the answer.' : tone === 'bad' ? 'Not drawn: waits have no end.' : 'No latency target depends on the load.');
    chart('.cost', c.cost, 'Cost against load', state !== 'final' ? 'Follows with the simulation.' : tone === 'bad' ? 'No plan meets the targets.' : 'No other load has a plan.');
    $('.day').hidden = !c.day;
    if (c.day) chart('.day', c.day);
    targets();
  };
  const options = () => {
    const list = get('answer').options || [];
    redraw($('.options'), title('Options', 'probability to meet every target') + (list.length
      ? `<table><thead><tr><th>Option</th><th>Plan</th><th class="r">Price</th><th>Probability</th></tr></thead><tbody>${list.map(o =>
        `<tr class="${o.chosen ? 'on' : ''}"><td><button class="link" data-key="o-${o.name}" data-changes='{"confidence": ${o.confidence}}'>${esc(o.label)}</button></td><td title="${esc(o.setup)}"><b>${esc(o.gpus.replace('-SXM', ''))}</b> <span class="lay">${esc(o.setup.replace(' weights', ''))}</span></td><td class="r" title="${esc(o.hour)}"><b>${esc(o.month)}</b></td><td>${odds(o.tone, o.probability)}</td></tr>`).join('')}</tbody></table>`
      : `<p class="none">${get('answer').state === 'final' ? 'None on these GPUs.' : 'Follow with the simulation.'}</p>`));
  };
  const others = () => {
    const o = get('others'), state = get('answer').state, doing = state === 'final' && !o.done;
    const small = doing ? 'searching' : '';
    const row = name => r => `<tr><td><button class="link" data-key="w-${esc(r.label)}" data-changes='${esc(JSON.stringify(r.changes)).replace(/'/g, '&#39;')}' ${Object.keys(r.changes).length ? '' : 'disabled'}>${esc(r.label)}</button></td>` + (r.gpus
      ? `<td title="${esc(r.setup)}"><b>${esc(name(r.gpus))}</b> <span class="lay">${esc(r.setup.replace(' weights', ''))}</span></td><td class="r" title="${esc(r.hour)}"><b>${esc(r.month)}</b></td><td class="r"><em class="${r.cheaper ? 'down' : ''}">${esc(r.change)}</em></td><td>${odds(r.tone, r.probability)}</td></tr>`
      : `<td class="lay" colspan="3">${esc(r.status)}</td><td>${odds(r.tone, 'no plan')}</td></tr>`);
    const table = (rows, first, empty, name) => rows?.length ? `<table><thead><tr><th>${first}</th><th>Plan</th><th class="r">Price</th><th></th><th>Probability</th></tr></thead><tbody>${rows.map(row(name)).join('')}</tbody></table>` : `<p class="none">${doing ? 'Searching.' : state === 'final' ? empty : 'Follow after the simulation.'}</p>`;
    redraw($('.gpus-too'), title('Same targets, other GPUs', `not on your list${doing ? ', searching' : ''}`) + table(o.gpus, 'GPU', 'No other GPU was searched.', gpus => gpus.split(' ')[0] === '1' ? '1 GPU' : `${gpus.split(' ')[0]} GPUs`));
    redraw($('.changes'), title('What would change the answer', small) + table(o.changes, 'Change', 'No change helps.', gpus => gpus.replace('-SXM', '')));
  };
  const memory = () => {
    const m = get('answer').memory, commands = get('answer').commands || [];
    redraw($('.memory'), m ? title('Memory', m.title) + `<div class="mem" role="img" aria-label="${esc(m.parts.map(p => `${p.name} ${p.gib} GiB`).join(', '))}">${m.parts.map((p, k) => `<div class="m${k}" style="flex:${p.share} 0 0" title="${esc(`${p.name} ${p.gib} GiB. ${p.details}`)}">${p.share > 24 ? `${esc(p.name)} ${p.gib}` : p.share > 8 ? p.gib : ''}</div>`).join('')}</div><div class="memkey">${m.parts.map(p => `<span>${esc(p.name)} ${p.gib}</span>`).join('')}<span>GiB</span></div><p class="cap">${esc(m.note)}</p>` : title('Memory') + '<p class="none">Follows with the answer.</p>');
    redraw($('.command'), `<div class="t">Command <small>${commands.length ? '<button class="link" data-key="copy" data-act="copy">Copy</button>' : ''}</small></div>`
      + (commands.length ? `<pre tabindex="0">${esc(commands.map(c => (c.role ? `# ${c.role}\n` : '') + c.text).join('\n\n'))}</pre>` : '<p class="none">No plan, no command.</p>'));
  };
  const why = () => {
    const a = get('answer'), lines = [...(a.why || []), ...(a.assumptions || []).map(text => `Assumed: ${text}`)];
    $('.why').hidden = !lines.length;
    $('.why > div').innerHTML = lines.map(text => `<p>${esc(text)}</p>`).join('');
  };
  const errors = () => {
    const error = get('answer').error;
    $$('.wrong').forEach(each => each.remove());
    $$('.invalid').forEach(each => each.classList.remove('invalid'));
    if (!error) return;
    const name = {seller: 'tier', at_most: 'gpus', find_max: 'rate', engine: 'model', quantization: 'model'}[error.field] || error.field;
    const place = $(`[data-field="${CSS.escape(name)}"]`) || $('[data-field="start"]');
    if (error.field === 'save') $('.save').hidden = false;
    if (place.closest('details')) place.closest('details').open = true;
    place.classList.add('invalid');
    place.append(make(`<div class="wrong" role="alert">${esc(error.text)}</div>`));
  };
  const answer = () => { card(); tiles(); options(); memory(); why(); charts(); others(); errors(); };
  const message = () => {
    const m = get('message');
    $('.said').hidden = !m.text;
    if (m.links) $('.save').hidden = true;
    $('.said').innerHTML = `${esc(m.text)} ${(m.links || []).map(([href, text]) => `<a href="${esc(href)}">${esc(text)}</a>`).join(' ')}${(m.files || []).map(([href, text]) => `<a href="${esc(href)}" target="_blank">${esc(text)}</a>`).join(' ')}`;
  };
  on('choices', choices)();
  on('controls', controls)();
  on('answer', answer)();
  on('charts', charts)();
  on('others', others)();
  on('message', message)();

  // ---- theme and size
  const theme = () => { el.dataset.theme = isDark() ? 'dark' : 'light'; };
  theme();
  const watch = new MutationObserver(theme);
  watch.observe(document.body, {attributes: true});
  const fit = () => {
    const pane = el.closest('.jp-WindowedPanel-outer');
    el.style.setProperty('--hr-h', `${Math.max((pane?.clientHeight || innerHeight) - 6, 560)}px`);
    const width = $('.latency').clientWidth - 32;
    if (width > 100 && Math.abs(width - (get('view').width || 0)) > 24) { // a chart that widens its own column would never end
      model.set('view', {...get('view'), width});
      model.save_changes();
    }
  };
  const resize = new ResizeObserver(fit);
  requestAnimationFrame(() => {
    fit();
    resize.observe(el.closest('.jp-WindowedPanel-outer') || document.documentElement);
    resize.observe($('.latency'));
  });
  return () => {
    watch.disconnect();
    resize.disconnect();
    cleanups.forEach(each => each());
  };
}

export default {render};
