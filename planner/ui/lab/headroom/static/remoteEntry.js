// What JupyterLab loads for Headroom, as a module container written by hand: there is nothing to build.
// The package's notebooks run when they are opened; links that they show open notebooks; and a button whose class is
// headroom-runs-all has its notebook run again after the kernel has heard of the click. All of that is for notebooks whose
// code cells are those of the package, word for word. Names, folders and Jupyter's trust (which a notebook without outputs
// always has) say nothing of who wrote the code.
(() => {
  const SHIPPED = [];
  // The line above: `planner lab` writes here {runsWhenOpened, code: [source of each code cell]} for each shipped notebook.
  // Code of the package imports what is installed, never a module that lies in the notebook's folder.
  const IMPORT_INSTALLED = `import os, sys
sys.path[:] = [place for place in sys.path if place and place != os.getcwd()]
os.environ["PYTHONSAFEPATH"] = "1"`;
  const seen = new WeakSet();
  const style = document.createElement('style');
  const arrow = "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'><path fill='white' d='M5 6l4 4 4-4 1 1-5 5-5-5z'/></svg>";
  style.textContent = `
    .jp-Placeholder-content, .jp-PlaceholderText {min-width: 0; overflow: hidden; text-overflow: ellipsis}
    .jp-CodeCell .cm-content {white-space: break-spaces; overflow-wrap: anywhere; flex-shrink: 1}
    [data-jp-theme-light="false"] {--jp-widgets-dropdown-arrow: url("data:image/svg+xml,${encodeURIComponent(arrow)}")}`;
  document.head.append(style); // a folded cell's first line stays within it, a long line goes on in the next; dropdown arrows are seen in the dark

  const isNotebook = panel => Boolean(panel && panel.context && panel.sessionContext && panel.content && panel.content.widgets);
  const codeCells = panel => panel.content.widgets.filter(cell => cell.model.type === 'code');

  // The shipped notebook whose code cells are exactly those of the panel, as they are now.
  function shipped(panel) {
    const code = codeCells(panel).map(cell => cell.model.sharedModel.getSource());
    return SHIPPED.find(one => one.code.length === code.length && one.code.every((source, k) => source === code[k]));
  }

  async function runAll(app, panel) {
    const session = panel.sessionContext.session;
    const kernel = session && session.kernel;
    if (!kernel || (await kernel.info).language_info.name !== 'python') return;
    await kernel.requestExecute({code: IMPORT_INSTALLED, silent: true, store_history: false}).done;
    if (panel.isDisposed || !shipped(panel)) return; // it may have changed meanwhile
    await app.commands.execute('notebook:run-all-cells', {semanticWidget: panel.id, activate: false}); // this one, whichever is in front
  }

  async function runWhenOpened(app, panel) {
    if (!isNotebook(panel) || seen.has(panel)) return;
    seen.add(panel);
    await Promise.all([panel.context.ready, panel.sessionContext.ready]);
    const known = shipped(panel);
    if (!known || !known.runsWhenOpened) return;
    if (codeCells(panel).some(cell => cell.model.executionCount)) return; // it runs in its kernel already
    const kernel = panel.sessionContext.session && panel.sessionContext.session.kernel;
    if (!kernel) return;
    const {content} = await kernel.requestCommInfo({target_name: 'jupyter.widget'});
    // The page has been loaded anew: JupyterLab fetches that kernel's old widgets, and would lose those of a new run.
    if (Object.keys(content.comms || {}).length) await kernel.restart();
    await runAll(app, panel);
    panel.content.activeCellIndex = 0;
  }

  // What was clicked, if it is in the output of a code cell of a notebook with the package's code: prose is anybody's.
  function clicked(panel, target, selector) {
    if (!isNotebook(panel) || !target.closest) return null;
    const cell = codeCells(panel).find(one => one.outputArea && one.outputArea.node.contains(target));
    return cell && shipped(panel) ? target.closest(selector) : null;
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
        const link = clicked(panel, event.target, '.headroom a[href$=".ipynb"]');
        if (link) {
          event.preventDefault();
          const folder = panel.context.path.split('/').slice(0, -1);
          app.commands.execute('docmanager:open', {path: [...folder, link.getAttribute('href')].join('/')});
        } else if (clicked(panel, event.target, '.headroom-runs-all')) {
          runAll(app, panel);
        }
      });
    }
  };

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.headroom = {init: () => {}, get: async () => () => ({__esModule: true, default: plugin})};
})();
