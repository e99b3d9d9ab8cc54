// The JupyterLab extension of Headroom: a module container written by hand, so that nothing is built.
// It runs the package's notebooks when they are opened, opens the notebooks that they link to, and
// reruns a notebook when a button of the class headroom-runs-all is clicked, after the kernel has
// handled the click. Their code is hidden until it is asked for. It does so only for notebooks whose code cells equal those of the package,
// because names, folders and Jupyter's trust (which a notebook without outputs always has) do not
// show who wrote the code.
(() => {
  const SHIPPED = [];
  // `headroom lab` replaces the line above by {runsWhenOpened, code: [source of each code cell]} for
  // each shipped notebook. Their code imports installed modules, never those in their own folder.
  const IMPORT_INSTALLED = `import os, sys
sys.path[:] = [place for place in sys.path if place and place != os.getcwd()]
os.environ["PYTHONSAFEPATH"] = "1"`;
  const seen = new WeakSet();
  const style = document.createElement('style');
  const arrow = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'>" +
    "<path fill='white' d='M5 6l4 4 4-4 1 1-5 5-5-5z'/></svg>";
  // The first line of a folded cell is cut off, long lines wrap, prose and tables begin at one edge without
  // code, and dark themes show the arrow.
  style.textContent = `
    .jp-Placeholder-content, .jp-PlaceholderText {min-width: 0; overflow: hidden; text-overflow: ellipsis}
    .headroom-walk:not(.headroom-shows-code) :is(.jp-Cell-inputWrapper, .jp-OutputPrompt, .jp-OutputArea-promptOverlay):not(.jp-MarkdownCell *) {display: none}
    .headroom-walk:not(.headroom-shows-code) .jp-CodeCell.jp-mod-noOutputs {display: none}
    .headroom-walk:not(.headroom-shows-code) .jp-MarkdownCell .jp-InputPrompt {display: none}
    .jupyter-widgets.jp-RenderedHTMLCommon table {margin-left: 0}
    .jp-CodeCell .cm-content {white-space: break-spaces; overflow-wrap: anywhere; flex-shrink: 1}
    [data-jp-theme-light="false"] {--jp-widgets-dropdown-arrow: url("data:image/svg+xml,${encodeURIComponent(arrow)}")}`;
  document.head.append(style);
  // A slider is called what its label says, and has the value that is shown beside it.
  const nameSliders = () => document.querySelectorAll('.widget-slider [role=slider]').forEach(handle => {
    const box = handle.closest('.widget-slider');
    const [label, shown] = ['.widget-label', '.widget-readout'].map(each => box.querySelector(each)?.textContent || '');
    if (handle.getAttribute('aria-label') !== label) handle.setAttribute('aria-label', label);
    if (handle.getAttribute('aria-valuetext') !== shown) handle.setAttribute('aria-valuetext', shown);
  });
  new MutationObserver(nameSliders).observe(document.documentElement, {childList: true, subtree: true});
  for (const kind of ['focusin', 'keyup']) document.addEventListener(kind, nameSliders);

  const isNotebook = panel =>
    Boolean(panel?.context && panel.sessionContext && panel.content?.widgets);
  const codeCells = panel => panel.content.widgets.filter(cell => cell.model.type === 'code');

  // Return the shipped notebook whose code cells equal the panel's at this moment.
  function findShipped(panel) {
    const code = codeCells(panel).map(cell => cell.model.sharedModel.getSource());
    return SHIPPED.find(
      notebook =>
        notebook.code.length === code.length &&
        notebook.code.every((source, k) => source === code[k])
    );
  }

  // Hide the code of a chapter, and add a button to its toolbar that shows it.
  function hideCode(panel) {
    panel.content.node.classList.add('headroom-walk');
    const button = document.createElement('button');
    button.className = 'headroom-code jp-ToolbarButtonComponent';
    const label = shows => {
      button.textContent = shows ? 'Hide code' : 'Show code';
      button.setAttribute('aria-pressed', shows);
    };
    button.addEventListener('click', () =>
      label(panel.content.node.classList.toggle('headroom-shows-code')));
    label(false);
    let Widget = panel.content.constructor; // Lumino's, which no module exports to this one
    while (Object.getPrototypeOf(Widget) !== Function.prototype) Widget = Object.getPrototypeOf(Widget);
    panel.toolbar.insertItem(10, 'headroom-code', new Widget({node: button}));
  }

  async function runAll(app, panel) {
    const kernel = panel.sessionContext.session?.kernel;
    if (!kernel || (await kernel.info).language_info.name !== 'python') return;
    await kernel.requestExecute({code: IMPORT_INSTALLED, silent: true, store_history: false}).done;
    if (panel.isDisposed || !findShipped(panel)) return; // it may have changed meanwhile
    // semanticWidget: run this notebook, even if another one is in front by now
    const options = {semanticWidget: panel.id, activate: false};
    await app.commands.execute('notebook:run-all-cells', options);
  }

  async function runWhenOpened(app, panel) {
    if (!isNotebook(panel) || seen.has(panel)) return;
    seen.add(panel);
    await Promise.all([panel.context.ready, panel.sessionContext.ready]);
    if (!findShipped(panel)?.runsWhenOpened) return;
    hideCode(panel);
    if (app.shell.leftCollapsed === false) app.shell.collapseLeft();
    const kernel = panel.sessionContext.session?.kernel;
    if (!kernel) return;
    const {content} = await kernel.requestCommInfo({target_name: 'jupyter.widget'});
    // The page was reloaded: JupyterLab restores the widgets of that kernel with their values where
    // the outputs were saved, and would lose those of a new run where they were not.
    const isLive = Object.keys(content.comms || {}).length > 0;
    if (isLive && codeCells(panel).some(cell => cell.model.executionCount)) return;
    if (isLive) await kernel.restart();
    // JupyterLab follows the last cell that runs; the reader begins with the first.
    let moved = false;
    for (const kind of ['wheel', 'pointerdown', 'keydown'])
      panel.node.addEventListener(kind, () => { moved = true; }, {once: true, capture: true});
    const showFirst = () => {
      if (moved || panel.isDisposed) return;
      panel.content.activeCellIndex = 0; // which alone does not scroll
      panel.content.scrollToItem(0, 'start');
    };
    const running = runAll(app, panel);
    const watch = setInterval(showFirst, 300);
    await running;
    setTimeout(() => { showFirst(); clearInterval(watch); }, 1000); // the last outputs are drawn by then
  }

  // Return the element for the selector that was clicked, or null. It must be in the output of a
  // code cell of a shipped notebook, as anybody can write other content.
  function findClicked(panel, target, selector) {
    const element = target.closest?.(selector);
    if (!element || !isNotebook(panel)) return null;
    const cell = codeCells(panel).find(cell => cell.outputArea?.node.contains(target));
    return cell && findShipped(panel) ? element : null;
  }

  const plugin = {
    id: 'headroom:plugin',
    autoStart: true,
    activate: app => {
      app.restored.then(() => {
        runWhenOpened(app, app.shell.currentWidget);
        app.shell.currentChanged.connect((_, changed) => runWhenOpened(app, changed.newValue));
      });
      document.addEventListener('click', event => {
        const panel = app.shell.currentWidget;
        const link = findClicked(panel, event.target, '.headroom a[href$=".ipynb"]');
        if (link) {
          event.preventDefault();
          const folder = panel.context.path.split('/').slice(0, -1);
          const path = [...folder, link.getAttribute('href')].join('/');
          app.commands.execute('docmanager:open', {path});
        } else if (findClicked(panel, event.target, '.headroom-runs-all')) {
          runAll(app, panel);
        }
      });
    }
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.headroom = {
    init: () => {},
    get: async () => () => ({__esModule: true, default: plugin})
  };
})();
